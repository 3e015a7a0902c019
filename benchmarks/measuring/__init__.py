"""What several bench programs measure with."""
