"""Prepares an all-reduce once, runs it many times, and prints its plan and its latency.

mpirun -n 2 python examples/02_all_reduce.py
"""

import numpy as np

import kccl

comm = kccl.init()
x = np.zeros(2, np.float32)
op = comm.all_reduce.prepare(x)
for step in range(100):
    x[:] = [step, comm.rank]
    op()
    assert x.tolist() == [step * comm.world_size, sum(range(comm.world_size))]

times_us = op.time(10_000, warmup=1_000)
if comm.rank == 0:
    print(op.plan.explain())
    print(f"median {np.median(times_us):.3f} us, p99 {np.percentile(times_us, 99):.3f} us")
