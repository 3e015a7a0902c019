"""Training: arguments, the trainer, checkpoints, log, memory, refreshed negatives."""
