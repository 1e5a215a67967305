"""A rank of test_all_reduce.test_processes: the matrix in short, with ranks that are processes."""

import numpy as np
import oracle
from programs import algorithms_for

import kccl

comm = kccl.init()
for salt, count in enumerate((1, 2, 3, 63, 64, 1025, 20_000, 150_001)):
    for dtype in oracle.DTYPES:
        names = algorithms_for("all_reduce", comm.world_size, dtype)
        for op in oracle.ops_of(dtype) if count < 20_000 else ("sum",):
            for algorithm in ("", "", *names):
                inputs = [oracle.exact(dtype, op, count, r, salt) for r in range(comm.world_size)]
                x = inputs[comm.rank].copy()
                comm.all_reduce(x, op=op, algorithm=algorithm)
                want = oracle.all_reduce(inputs, op)
                oracle.assert_same(x, want, dtype, op, algorithm, comm.rank)
    for root in range(comm.world_size):
        for algorithm in ("", "", *algorithms_for("broadcast", comm.world_size, "bfloat16")):
            want = oracle.any_bits("bfloat16", count, np.random.default_rng(salt))
            x = want.copy() if comm.rank == root else np.zeros_like(want)
            comm.broadcast(x, root, algorithm=algorithm)
            oracle.assert_same(x, want, "broadcast", root, algorithm, comm.rank)
comm.barrier()
comm.close()
print("right")  # mpirun passes it on
