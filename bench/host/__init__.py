"""Benchmarks in host memory and on the simulator."""
