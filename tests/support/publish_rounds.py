"""For all targets: the arguments of publish_rounds.cuh's kernels, and what they must collect."""

from itertools import product
from pathlib import Path

import numpy as np
import oracle

import kccl

SOURCE = Path(__file__).parents[1] / "kernels" / "publish_rounds.cuh"
REACHES = {"rank": "kKcclReachRank", "all_ranks": "kKcclReachAllRanks"}
# "reduced": the slices are reduced over the ranks.
KINDS = {each: f"{name}, false" for each, name in REACHES.items()}
KINDS["reduced"] = "kKcclReachAllRanks, true"
ORDERS = {"relaxed": "kccl::mem::Order::kRelaxed", "acq_rel": "kccl::mem::Order::kAcqRel"}
TYPES = {"uint8": "uint8_t", "float32": "float"}
CASES = [case for case in product(KINDS, ORDERS, TYPES) if case[::2] != ("reduced", "uint8")]
NOBODY = 2**32 - 1


def name(kind, order, dtype):
    """The kernel's name."""
    arguments = KINDS[kind], ORDERS[order], TYPES[dtype]
    return f"publish_rounds::exchanges<{', '.join(arguments)}>"


NAMES = [name(*case) for case in CASES]


def compiled():
    """The kernels for GPUs; compiling takes ten seconds unless KCCL_CACHE has them."""
    return kccl.compile(SOURCE, NAMES, target=kccl.gpu.backend())


def slices(rank, rounds, blocks, count, dtype, seed=0):
    """A rank's slices, [round][block][count]: any bytes, or floats without NaN."""
    rng = np.random.default_rng([seed, rank, rounds, blocks, count])
    shape = rounds, blocks, count
    if dtype == "float32":
        return rng.standard_normal(shape, np.float32)
    return rng.integers(256, size=shape, dtype=np.uint8)


def collected(comm, kind, rounds, blocks, count, dtype, seed=0):
    """What all blocks of a rank must have collected, [block][round][slice][count]."""
    ranks = [comm.rank] if kind == "rank" else range(comm.world_size)
    of_ranks = [slices(rank, rounds, blocks, count, dtype, seed) for rank in ranks]
    if kind == "reduced":
        every = oracle.all_reduce(of_ranks, "sum")
    else:
        every = np.concatenate(of_ranks, axis=1)
    return np.broadcast_to(every, (blocks, *every.shape))
