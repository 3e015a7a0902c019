"""`contaccum compare`: which runs there are (plan), one run in its process (run), what came out (report)."""
