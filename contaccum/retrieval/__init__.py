"""Encoding of a corpus, stores of embeddings, FAISS indexes and search.

Import its modules by name, such as `contaccum.retrieval.store`.
"""
