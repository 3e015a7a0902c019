"""Training: arguments, the trainer, checkpoints, log and memory."""
