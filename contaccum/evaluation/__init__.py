"""Scores of retrieval: metrics, significance, results on disk, BEIR, open-domain QA, evaluators."""
