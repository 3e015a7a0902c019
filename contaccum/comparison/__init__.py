"""The parts of `contaccum compare`: the plan of the runs, a single run, tuning, and the report.

An entry is a method, or a variant of a method. A cell is one combination of the grid's values. A
group has the runs of one entry in one cell, with one run for each seed.
"""
