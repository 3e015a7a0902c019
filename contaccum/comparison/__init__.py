"""The parts of `contaccum compare`: the plan of the runs, a single run, tuning, and the report."""
