"""Messages between GPUs: in rings, in any order, in graphs, and to a rank that is late."""

import pytest
from gpu_ranks import ranks

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

OF_BYTES = """
right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
def data(nbytes, sender):
    numbers = torch.arange(nbytes, dtype=torch.int64, device="cuda")
    return ((numbers * 7 + numbers // 251 + 13 * sender + 1) % 256).to(torch.uint8)
"""


@pytest.mark.parametrize("world_size", [2, 4])
def test_neighbours_exchange_messages(world_size):
    """By packets and in bulk, grouped or begun, of lengths that no packet and no block divides."""
    ranks(
        world_size,
        OF_BYTES
        + """
for nbytes in (0, 3, 8, 8192, 9001, 300_001, (64 << 20) + 5):
    x, y, z = data(nbytes, comm.rank), *(torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
                                         for _ in range(2))
    for _ in range(3):
        y.zero_()
        with comm.group():
            comm.send(x, right)
            comm.recv(y, left)
        assert torch.equal(y, data(nbytes, left)), nbytes
    z.zero_()
    comm.isend(x, left)
    comm.all_reduce(filled())
    comm.irecv(z, right).wait()
    assert torch.equal(z, data(nbytes, right)), nbytes
# Short messages are buffered, so ranks may send before they receive.
x, y = data(512, comm.rank), torch.zeros(512, dtype=torch.uint8, device="cuda")
for _ in range(100):
    comm.send(x, right)
    comm.recv(y, left)
assert torch.equal(y, data(512, left))
# The messages of a group are in the order of their tags, in which ranks need not name them.
peer, found = right, {tag: torch.zeros(512, dtype=torch.uint8, device="cuda") for tag in (3, 1)}
if comm.world_size == 2:
    with comm.group():
        for tag in (1, 3):
            comm.send(data(512, comm.rank + tag), peer, tag)
        for tag, z in found.items():
            comm.recv(z, peer, tag)
    assert all(torch.equal(z, data(512, peer + tag)) for tag, z in found.items())
comm.check()
comm.close()
say(rank=comm.rank)
""",
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_captured_exchange_is_replayed_with_other_data(world_size):
    ranks(
        world_size,
        OF_BYTES
        + """
for nbytes in (64, 8192, 4 << 20):
    x, y = (torch.zeros(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    def exchange():
        with comm.group():
            comm.send(x, right)
            comm.recv(y, left)
    exchange()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            exchange()
    for turn in range(4):
        x.copy_(data(nbytes, comm.rank + turn))
        y.zero_()
        graph.replay()
        if turn % 2:
            exchange()
        assert torch.equal(y, data(nbytes, left + turn)), (nbytes, turn)
    torch.cuda.synchronize()
    comm.barrier()
comm.check()
say(rank=comm.rank)
""",
    )


@pytest.mark.parametrize("world_size", [2])
def test_a_message_that_is_not_sent(world_size):
    facts = ranks(world_size, """
comm.timeout = 1.0
error = None
if comm.rank == 0:
    x = filled(100_000)
    comm.recv(x, 1)
    try:
        torch.cuda.synchronize()
        comm.check()
    except Exception as failure:
        error = [type(failure).__name__, str(failure)]
say(rank=comm.rank, error=error)
""")  # fmt: skip
    name, text = facts[0]["error"]
    assert name in ("Timeout", "PeerLost") and "peer 1" in text, text
