"""Which algorithms the tests of collectives run on GPUs: all that are made for them."""

import oracle
from programs import algorithms_for


def of_gpus(collective, world_size, dtype="int32"):
    return algorithms_for(collective, world_size, dtype, "cuda")


def reductions(world_size):
    """Element type, operator and algorithm of every all_reduce."""
    for dtype in oracle.DTYPES:
        for op in oracle.ops_of(dtype):
            for algorithm in of_gpus("all_reduce", world_size, dtype):
                yield dtype, op, algorithm


def scatters_and_gathers(world_size):
    """All algorithms of reduce_scatter and of all_gather, in as few pairs as have all."""
    scatters, gathers = of_gpus("reduce_scatter", world_size), of_gpus("all_gather", world_size)
    for number in range(max(len(scatters), len(gathers))):
        yield scatters[number % len(scatters)], gathers[number % len(gathers)]
