"""Kills a rank. The others get an error that names it, and go on without it.

kccl run -n 3 -- python examples/04_lost_rank.py
"""

import os
import signal

import numpy as np

import kccl

comm = kccl.init()
x = np.ones(4, np.float32)
for step in range(1_000_000):
    if comm.rank == 1 and step == 1000:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(x, op="max")
    except kccl.PeerLost as error:
        print(f"rank {comm.rank}: {error}")
        break

survivors = comm.shrink()
x[:] = 1
survivors.all_reduce(x)
print(f"rank {comm.rank} goes on as rank {survivors.rank} of {survivors.world_size}: {x}")
