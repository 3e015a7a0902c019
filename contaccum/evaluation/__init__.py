"""Scores of retrieval: metrics, significance, results on disk, BEIR, evaluators."""
