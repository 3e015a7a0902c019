"""Losses for sentence-transformers.

They encode the columns of a data set and call the method in `contaccum.bank`.
"""
