"""Encoding a corpus, stores of embeddings, FAISS indexes and search. Modules are imported by name."""
