"""Parts of benchmarks/gpu.py, one module each.

A part has its sizes, `SIZES` and, for a dry run, `TINY`, and a function `list_cases(sizes, run)`,
which yields the name of each case and the function that measures it. `tables.py` has their tables.
"""
