"""Prints who each rank is, and sums an array over all ranks.

mpirun -n 2 python examples/01_hello.py
kccl run -n 2 -- python examples/01_hello.py
"""

import numpy as np

import kccl

comm = kccl.init()
x = np.full(4, comm.rank + 1, np.float32)
comm.all_reduce(x)
print(f"rank {comm.rank} of {comm.world_size} by {comm.launcher}: {x}")
