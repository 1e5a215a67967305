"""The simulated machine, seen from Python: libraries of kernels, the machine, what it found."""
