"""The parts of `compare.py`: the groups of runs, a single run, tuning, and the report.

An entry is a method, or a variant: a method with other settings. A group has the runs of an entry,
one for each seed.
"""
