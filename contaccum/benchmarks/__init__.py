"""Benchmarks that users can run: `contaccum bench update`."""
