"""Training: arguments, the trainer, checkpoints, log, memory, and refreshed hard negatives."""
