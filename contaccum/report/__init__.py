"""`contaccum report`: what lies at a path, what is said of it, and pictures of it."""
