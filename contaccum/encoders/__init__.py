"""Encoders: `DualEncoder`, loading and settings of models, LoRA adapters, gradient norms."""
