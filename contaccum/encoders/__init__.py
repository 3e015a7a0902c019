"""Encoders: `DualEncoder`, loading, settings, adapters and export of models."""
