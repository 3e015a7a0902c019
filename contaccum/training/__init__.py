"""Training: arguments, the trainer, its callbacks, and the `contaccum train` command."""
