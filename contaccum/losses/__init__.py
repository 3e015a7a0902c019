"""Losses for sentence-transformers, with a memory bank (contaccum) or a store (query_side).

Each loss encodes the columns of a micro-batch, and calls `contaccum.bank` to compute the loss of
their embeddings.
"""
