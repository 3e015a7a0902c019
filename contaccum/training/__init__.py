"""Training: arguments, the trainer and what surrounds it: checkpoints, log, memory, refreshed negatives."""
