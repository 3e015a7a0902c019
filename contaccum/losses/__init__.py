"""Losses for sentence-transformers: they encode the columns of a data set and call the method in `contaccum.bank`."""
