"""`contaccum reproduce TABLE1`: the ContAccum paper's main table, step by step from download to score."""
