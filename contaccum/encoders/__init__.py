"""Encoders: `DualEncoder`, what loads and configures models, adapters, gradient norms by tower."""
