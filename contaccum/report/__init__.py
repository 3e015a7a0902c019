"""`contaccum report`: what lies at a path (sources), what is said of it (page), and pictures of it (charts)."""
