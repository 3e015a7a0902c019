"""Reports: one HTML page of training runs, evaluations and comparisons, drawn from the files that these leave."""
