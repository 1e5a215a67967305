"""Benchmarks of calls inside persistent kernels."""
