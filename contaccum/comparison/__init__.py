"""`contaccum compare`: methods, grids of settings and seeds trained side by side, and one report of them all."""
