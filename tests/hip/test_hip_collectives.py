"""Every collective by every algorithm on the hip backend: through hip-python, with kernels that the
simulator runs with warps of 64 and gfx942's memory model.
"""

import collectives
import oracle
import pytest
from hip_arrays import from_gpu, ordinal_of, to_gpu
from programs import OF_DATA, algorithms_for

import kccl

# Sizes of a lane's part of a packet, of some packets, and of more than one block.
COUNTS = (1, 5, 300)
DTYPE = "float32"


def call_all(comm, names):
    """Makes every call of collectives; returns what was wrong."""
    wrong, ordinal = [], ordinal_of(comm)
    for name in names:
        of_it = collectives.load(name)
        for number, algorithm in enumerate(algorithms_for(name, comm.world_size, DTYPE, "hip")):
            for count in COUNTS:
                root = number % comm.world_size
                size = count * comm.world_size if of_it.HAS_CHUNKS else count
                inputs = [
                    oracle.exact(DTYPE, "sum", size, rank, number)
                    for rank in range(comm.world_size)
                ]
                x = to_gpu(inputs[comm.rank], ordinal)
                out = to_gpu(want_like(of_it, inputs, comm.rank, root), ordinal)
                keywords = {} if name in ("all_reduce", "broadcast") else {"out": out}
                got = of_it.call(comm, x, op="sum", root=root, algorithm=algorithm, **keywords)
                want = of_it.want(inputs, comm.rank, op="sum", root=root)
                if (oracle.bits(from_gpu(got).reshape(-1)) != oracle.bits(want)).any():
                    wrong.append((name, algorithm, count))
    comm.barrier()
    comm.check()
    return wrong


def want_like(of_it, inputs, rank, root):
    return 0 * of_it.want(inputs, rank, op="sum", root=root)


@pytest.mark.parametrize("name", OF_DATA)
def test_between_threads_bits_are_the_oracles(amd, name):
    assert kccl.run_threads(lambda comm: call_all(comm, [name]), 2, backend="hip") == [[], []]
