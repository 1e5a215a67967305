"""A rank of tests that run ranks with GPUs on several nodes: every collective, on arrays of a GPU.

gpu_nodes.py <backend> [few]    few: shorter pieces, so that short messages have several
"""

import sys

import numpy as np
from hip_arrays import from_gpu, to_gpu

import kccl
from kccl.gpu import library
from kccl.plan import pieces

if "few" in sys.argv:
    pieces.pieces.__defaults__ = (4096,)


def refuse(*instance):
    raise AssertionError(f"{instance} is compiled, which no call between nodes needs")


library.compile_kernel, compile_kernel = refuse, library.compile_kernel
comm = kccl.init(sys.argv[1])
library.compile_kernel = compile_kernel
rank, size = comm.rank, comm.world_size
ordinal = comm.context.backend.device.ordinal


def given(count, dtype, salt=0):
    """Every rank's array: small whole numbers, whose sums are exact."""
    drawn = np.random.default_rng(count + salt).integers(0, 7, (size, count))
    return drawn.astype(dtype)


def room(count, dtype="float32"):
    """An array for a result."""
    return to_gpu(np.zeros(count, dtype), ordinal)


def check(what, got, wanted):
    got = from_gpu(got).reshape(-1)
    assert np.array_equal(got, np.asarray(wanted).reshape(-1)), (rank, what, got, wanted)


for count in (1, 3, 1000, 9001):
    for dtype in ("float32", "int64", "float16"):
        all_of = given(count, dtype)
        mine = all_of[rank]
        x = to_gpu(mine, ordinal)
        total = all_of.astype("float64").sum(0).astype(dtype)
        check("all_reduce", comm.all_reduce(x), total)
        out = to_gpu(np.zeros_like(mine), ordinal)
        x = to_gpu(mine, ordinal)
        check("all_reduce out", comm.all_reduce(x, out=out, op="max"), all_of.max(0))
        check("its input", x, mine)
        for root in {0, size - 1}:
            result = comm.reduce(x, root=root, out=out)
            if rank == root:
                check("reduce", result, total)
            gathered = comm.gather(
                x, root=root, out=room(size * count, dtype) if rank == root else None
            )
            if rank == root:
                check("gather", gathered, all_of)
            sent = to_gpu(mine, ordinal)
            check("broadcast", comm.broadcast(sent, root=root), all_of[root])
            whole = to_gpu(given(size * count, dtype, 1)[root], ordinal) if rank == root else None
            part = comm.scatter(whole, root=root, out=to_gpu(mine, ordinal))
            check("scatter", part, given(size * count, dtype, 1)[root].reshape(size, -1)[rank])
        check("all_gather", comm.all_gather(x, out=room(size * count, dtype)), all_of)
        wide = given(size * count, dtype, 2)
        x = to_gpu(wide[rank], ordinal)
        got = comm.all_to_all(x, out=room(size * count, dtype))
        check("all_to_all", got, wide.reshape(size, size, -1)[:, rank])
        chunk = wide.reshape(size, size, -1)[:, rank].astype("float64").sum(0).astype(dtype)
        check("reduce_scatter", comm.reduce_scatter(x, out=room(count, dtype)), chunk)
        x = to_gpu(mine, ordinal)
        upto = all_of[: rank + 1].astype("float64").sum(0).astype(dtype)
        check("scan", comm.scan(x, out=to_gpu(mine, ordinal)), upto)
        comm.barrier()

# Parts of their own lengths, a factor before the sum, and a call prepared once.
counts = [rank * 700 + 5 for rank in range(size)]
ragged = [given(n, "float32", 4)[r] for r, n in enumerate(counts)]
x = to_gpu(ragged[rank], ordinal)
got = comm.all_gather(x, counts=counts, out=room(sum(counts)))
check("all_gather counts", got, np.concatenate(ragged))
lengths = [[(r + p) % 3 * 400 for p in range(size)] for r in range(size)]
rows = [np.arange(sum(each), dtype="float32") + 1000 * r for r, each in enumerate(lengths)]
parts = []
for r in range(size):
    begin = sum(lengths[r][:rank])
    parts.append(rows[r][begin : begin + lengths[r][rank]])
got = comm.all_to_all(
    to_gpu(rows[rank], ordinal),
    send_counts=lengths[rank],
    recv_counts=[lengths[r][rank] for r in range(size)],
    out=room(sum(lengths[r][rank] for r in range(size))),
)
check("all_to_all counts", got, np.concatenate(parts))
x = to_gpu(np.full(300, rank + 1, "float32"), ordinal)
check("premul", comm.all_reduce(x, op=kccl.premul_sum(0.5)), [sum(range(1, size + 1)) / 2] * 300)
x = to_gpu(np.ones(70000, "float32"), ordinal)
op = comm.all_reduce.prepare(x)
for _ in range(3):
    op()
check("prepared", x, [float(size) ** 3] * 70000)
try:
    comm.send(x, (rank + 1) % size)
except kccl.InvalidArgument as error:
    assert "comm.split(comm.node)" in str(error), error
else:
    raise AssertionError("send() between nodes")
comm.barrier()
if sys.argv[1:] == ["hip", "few"]:
    import hip_runtime  # Only the tests' own runtime can let a copy fail.

    # The first output cannot be copied to rank 0's GPU. By then the ranks have exchanged a piece,
    # so the call must fail on all ranks until they reset.
    x = to_gpu(np.ones(70000, "float32"), ordinal)
    if rank == 0:
        hip_runtime.fail("hipMemcpyHtoDAsync", 700)
    for _ in range(2):
        try:
            comm.all_reduce(x)
        except kccl.Error as error:
            said = error
        else:
            raise AssertionError("a copy failed, and the call did not")
        hip_runtime.fail("hipMemcpyHtoDAsync", 0)
    assert said.rank == 0, said
    comm.reset()
    x = to_gpu(np.ones(70000, "float32"), ordinal)
    check("after reset()", comm.all_reduce(x), [float(size)] * 70000)
comm.close()
print("right", flush=True)
