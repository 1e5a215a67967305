"""The Python side of the simulator: libraries of kernels, the machine, reports of findings."""
