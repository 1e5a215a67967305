"""Benchmarks on GPUs, and `make gpu`."""
