"""`contaccum report`: what lies at a path and what is said of it (page), and pictures of it (charts)."""
