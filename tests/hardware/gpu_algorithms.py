"""Which algorithms the tests of collectives run on GPUs: all that are made for them."""

import oracle
from gpu_vendor import BACKEND
from programs import algorithms_for


def of_gpus(collective, world_size, dtype="int32"):
    return algorithms_for(collective, world_size, dtype, BACKEND)


def reductions(world_size):
    """Element type, operator and algorithm of every all_reduce."""
    for dtype in oracle.DTYPES:
        for op in oracle.ops_of(dtype):
            for algorithm in of_gpus("all_reduce", world_size, dtype):
                yield dtype, op, algorithm
