"""The search of a run's settings on dev data: the search space, the trials and the choice."""
