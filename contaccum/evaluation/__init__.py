"""Scoring retrieval: metrics, significance, results on disk, BEIR, open-domain QA, evaluation while training."""
