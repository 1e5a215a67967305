"""A rank of test_all_reduce.test_processes: each algorithm, with ranks that are processes.

Threads run the same kernels with every type, operator and length. What differs here is whose memory
a window lies in, and how a peer's array is read.
"""

import numpy as np
import oracle
from programs import algorithms_for

import kccl

comm = kccl.init()
for salt, count in enumerate((1, 3, 1025, 150_001)):
    for dtype in ("float32", "bfloat16", "int64"):
        for algorithm in ("", "", *algorithms_for("all_reduce", comm.world_size, dtype)):
            inputs = [oracle.exact(dtype, "sum", count, r, salt) for r in range(comm.world_size)]
            x = inputs[comm.rank].copy()
            comm.all_reduce(x, algorithm=algorithm)
            oracle.assert_same(x, oracle.all_reduce(inputs, "sum"), dtype, algorithm, comm.rank)
    for root in range(comm.world_size):
        for algorithm in ("", "", *algorithms_for("broadcast", comm.world_size, "bfloat16")):
            want = oracle.any_bits("bfloat16", count, np.random.default_rng(salt))
            x = want.copy() if comm.rank == root else np.zeros_like(want)
            comm.broadcast(x, root, algorithm=algorithm)
            oracle.assert_same(x, want, "broadcast", root, algorithm, comm.rank)
comm.barrier()
comm.close()
print("right")  # mpirun passes it on
