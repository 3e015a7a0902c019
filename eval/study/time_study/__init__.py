"""The study by time: its plan, its runs, and its tables."""
