"""Experiments: one training in a folder, a search of settings, and `contaccum fit`."""
