"""Parts of benchmarks/gpu.py, one module each."""
