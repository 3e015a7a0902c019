"""Encoders: `DualEncoder`, adapters on it, and the gradient norms of its towers."""
