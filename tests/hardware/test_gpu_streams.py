"""Streams of calls that the ranks begin in different orders, up to KCCL_STREAMS of them."""

import pytest
from gpu_ranks import ranks

pytest.importorskip("torch", reason="PyTorch is not installed")

# Every stream has a communicator of its own, and a graph of 40 calls. Rank 0 begins with the first
# stream, and rank 1 with the last one. Multiplications on one more stream take room now and then.
PROGRAM = """
streams = [torch.cuda.Stream() for _ in range(num)]
comms = [comm, *(comm.split(0) for _ in range(num - 1))]
xs = [filled(count) for _ in comms]
factor, product = (torch.ones((4096, 4096), device="cuda") for _ in range(2))
torch.mm(factor, factor, out=product)
graphs = []
for each, x in zip(comms, xs):
    for op in ("sum", "avg"):
        each.all_reduce(x.clone(), op=op)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            each.all_reduce(x)
            each.all_reduce(x, op="avg")
    graphs.append(graph)
order = list(range(num)) if comm.rank == 0 else list(range(num))[::-1]
beside = torch.cuda.Stream()
torch.cuda.synchronize()
for turn in range(5):
    with torch.cuda.stream(beside):
        torch.mm(factor, factor, out=product)
    for at in order:
        with torch.cuda.stream(streams[at]):
            graphs[at].replay()
torch.cuda.synchronize()
for each, x in zip(comms, xs):
    each.check()
    # Exact: the first call sums, and each of the further sums doubles.
    assert (x == total * comm.world_size**99).all(), x
say(rank=comm.rank)
"""


@pytest.mark.parametrize("world_size", [2])
@pytest.mark.parametrize(("num", "variables"), [(2, {}), (8, {"KCCL_STREAMS": "8"})])
@pytest.mark.parametrize("count", [1 << 18, 1 << 22], ids=["1 MB", "16 MB"])
def test_ranks_begin_streams_in_different_orders(world_size, num, variables, count):
    program = f"num, count = {num}, {count}" + PROGRAM
    ranks(world_size, program, KCCL_TIMEOUT="20", **variables)


@pytest.mark.parametrize("world_size", [2])
def test_rows_and_messages_of_two_streams_fit_beside_each_other(world_size):
    """Rows of 16 KB, each of which takes a multiprocessor, on both streams; then long messages."""
    ranks(world_size, """
width, number = 8192, 16
streams = [torch.cuda.Stream() for _ in range(2)]
comms = [comm, comm.split(0)]
def tensor(rows):
    return torch.ones((rows, width), dtype=torch.bfloat16, device="cuda")
given = [(tensor(number), tensor(number), tensor(1)[0]) for _ in comms]
long = [(filled(1 << 22), torch.empty(1 << 22, device="cuda")) for _ in comms]
peer = 1 - comm.rank
def normed(at):
    comms[at].all_reduce_rms_norm(*given[at], 1e-5)
def sent(at):
    out, back = long[at]
    with comms[at].group():
        comms[at].send(out, peer)
        comms[at].recv(back, peer)
for call in (normed, sent):
    for at in range(2):
        call(at)
    torch.cuda.synchronize()
    for turn in range(20):
        for at in (0, 1) if comm.rank == 0 else (1, 0):
            with torch.cuda.stream(streams[at]):
                call(at)
    torch.cuda.synchronize()
for each, (_, back) in zip(comms, long):
    each.check()
    assert (back == peer + 1).all()
say(rank=comm.rank)
""", KCCL_TIMEOUT="20")  # fmt: skip
