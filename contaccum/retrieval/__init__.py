"""Encoding of a corpus, stores of embeddings, FAISS indexes and search."""
