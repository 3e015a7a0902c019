"""Encoders: `DualEncoder`, loading, settings, adapters, interpolation and export of models."""
