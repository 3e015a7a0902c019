"""Encoding a corpus, FAISS indexes over it, and search. Modules are imported by name: `searcher` imports beir."""
