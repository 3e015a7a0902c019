"""Choosing the settings of a run on dev data: the search space, the search, a choice that survives noise."""
