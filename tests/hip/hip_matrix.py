"""The matrix of collectives on the hip backend."""

import collectives
import oracle
from hip_arrays import from_gpu, ordinal_of, to_gpu
from programs import OF_DATA, algorithms_for

# Sizes of a lane's part of a packet, of some packets, and of more than one block.
COUNTS = (1, 5, 300)
WORLD_SIZES = (2, 3, 4)
# Each width of an element, floats and integers. tests/sim draws from all types.
DTYPES = ("float32", "bfloat16", "int64")
FIRST = ("float32", "sum")
REDUCTIONS = tuple(name for name in OF_DATA if collectives.load(name).MOVES.reduces)


def calls(name, world_size):
    """(algorithm, element type, operator) of the calls of a collective on so many ranks.

    Each algorithm has one type and operator, on one number of ranks or two, and each number of
    ranks meets each collective. Every other type and operator meets one algorithm of all_reduce.
    tests/sim draws from all combinations, which would be twenty times as many kernels to compile.
    """
    ranks = WORLD_SIZES.index(world_size)
    if name not in REDUCTIONS:
        # An algorithm that only moves data has one type: its elements are bytes.
        for index, algorithm in enumerate(algorithms_for(name, world_size, FIRST[0], "hip")):
            if (index + ranks) % 2 == 0:
                yield algorithm, DTYPES[index % len(DTYPES)], "sum"
        return
    for kind, dtype in enumerate(DTYPES):
        algorithms = algorithms_for(name, world_size, dtype, "hip")
        for index, algorithm in enumerate(algorithms):
            for number, op in enumerate(oracle.ops_of(dtype)):
                turn = kind + number
                is_drawn = (
                    name == "all_reduce"
                    and turn % len(algorithms) == index
                    and (turn + index) % len(WORLD_SIZES) == ranks
                )
                is_first = (dtype, op) == FIRST and (index + ranks) % 2 == 0
                if is_drawn or is_first:
                    yield algorithm, dtype, op


def call_all(comm, names):
    """Makes every call of collectives; returns what was wrong."""
    wrong, ordinal, ranks = [], ordinal_of(comm), range(comm.world_size)
    for name in names:
        of_it = collectives.load(name)
        for number, (algorithm, dtype, op) in enumerate(calls(name, comm.world_size)):
            for count in COUNTS:
                root = number % comm.world_size
                size = count * comm.world_size if of_it.HAS_CHUNKS else count
                inputs = [oracle.exact(dtype, op, size, rank, number) for rank in ranks]
                want = of_it.want(inputs, comm.rank, op=op, root=root)
                x, keywords = to_gpu(inputs[comm.rank], ordinal), {}
                if want is not None and name not in ("all_reduce", "broadcast"):
                    keywords["out"] = to_gpu(0 * want, ordinal)
                got = of_it.call(comm, x, op=op, root=root, algorithm=algorithm, **keywords)
                if want is None or got is None:
                    is_wrong = want is not got
                else:
                    found = from_gpu(got).reshape(-1)
                    is_wrong = (oracle.bits(found) != oracle.bits(want)).any()
                if is_wrong:
                    wrong.append((name, algorithm, dtype, op, count))
    comm.barrier()
    comm.check()
    return wrong


def instances():
    """The kernels of all calls, as kccl.tools.warm takes them."""
    return [
        (*call, world_size)
        for name in OF_DATA
        for world_size in WORLD_SIZES
        for call in calls(name, world_size)
    ]
