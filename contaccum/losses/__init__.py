"""Losses for sentence-transformers.

They encode the columns of a data set, and compute the loss of `contaccum.bank` on the embeddings.
"""
