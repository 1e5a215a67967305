"""Chooses the kernel that runs a call, from the kernels that there are and what was measured."""
