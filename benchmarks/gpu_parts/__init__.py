"""The parts of benchmarks/gpu.py, a module for each."""
