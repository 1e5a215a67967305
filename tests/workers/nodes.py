"""A rank of tests/ranks/test_nodes.py: every collective, with ranks on several nodes."""

import sys

import oracle
from groups import check_all, check_reductions, check_to_root_and_lower

import kccl

comm = kccl.init()
assert comm.node == comm.context.backend.grouping.place(comm.rank)[0]
check_all(comm)
if "types" in sys.argv:
    every = ("float64", "bfloat16", "int64", "uint8", "float8_e4m3fn", "bool", "complex64")
    # One half of them on an even number of ranks, the other half on an odd one.
    for name in every[comm.world_size % 2 :: 2]:
        for op in oracle.ops_of(name):
            check_reductions(comm, name, op)
            check_to_root_and_lower(comm, name, op)
comm.barrier()
comm.close()
print("right")  # mpirun passes it on
