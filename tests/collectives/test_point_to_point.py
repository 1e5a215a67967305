"""send, recv, isend, irecv and group: order, tags, any source, bounds, failures."""

import random
import threading

import numpy as np
import preloaded
import pytest
from ranks import run

import kccl

# What one record of a ring carries; a longer message goes by address, or in pieces.
SHORT = 8160
LENGTHS = [0, 1, 7, 8, 31, 33, 4096, SHORT - 1, SHORT, SHORT + 1, 100_000, 3_000_000]


def bytes_of(length, *seed):
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8).view(np.int8)


@pytest.fixture(params=["attach", "ring"])
def way(request, monkeypatch):
    """How long messages go: the receiver reads the sender's memory, or they go through the ring."""
    if request.param == "ring":
        monkeypatch.setattr(
            "kccl.backends.host.HostBackend._try_to_attach", lambda *_: False, raising=True
        )
    return request.param


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_every_pair_and_length(world_size, way):
    """Every rank sends to every rank, itself included, in one group a length."""

    def main(comm):
        for length in LENGTHS:
            mine = [bytes_of(length, comm.rank, peer) for peer in range(world_size)]
            theirs = [np.zeros(length, np.int8) for _ in range(world_size)]
            with comm.group():
                for peer in range(world_size):
                    comm.send(mine[peer], peer)
                for peer in range(world_size):
                    assert comm.recv(theirs[peer], peer) is theirs[peer]
            for peer in range(world_size):
                assert (theirs[peer] == bytes_of(length, peer, comm.rank)).all(), (length, peer)

    kccl.run_threads(main, world_size)


def test_ring_of_blocking_calls(way):
    """Short sends need no receiver yet; the order of messages is kept over many turns of a ring."""

    def main(comm):
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        for turn in range(3000):
            x = np.full(turn % 50, turn * 3 + comm.rank, np.int64)
            y = np.empty_like(x)
            comm.send(x, right)
            comm.recv(y, left)
            assert (y == turn * 3 + left).all(), turn

    kccl.run_threads(main, 3)


def test_tags_out_of_order(way):
    """A receive takes the first message of its tag; others wait, in order, long ones too."""

    def main(comm):
        lengths = [5, 20_000, 1, 9_000, 70_000, 3]
        if comm.rank == 0:
            requests = [
                comm.isend(np.full(n, 10 * tag + i, np.int32), 1, tag)
                for i, n in enumerate(lengths)
                for tag in (4, 9)
            ]
            for request in requests:
                request.wait()
                assert request.is_done and request.source is None
        else:
            for tag in (9, 4):
                for i, n in enumerate(lengths):
                    x = np.empty(n, np.int32)
                    comm.recv(x, 0, tag)
                    assert (x == 10 * tag + i).all()

    kccl.run_threads(main, 2)


def test_any_source_and_tag():
    def main(comm):
        if comm.rank:
            for turn in range(20):
                comm.send(np.array([comm.rank * 100 + turn]), 0, tag=turn)
            return
        seen = {1: [], 2: [], 3: []}
        for _ in range(60):
            x = np.empty(1, np.int64)
            request = comm.irecv(x)
            assert request.wait() is x
            assert x[0] == request.source * 100 + request.tag
            seen[request.source].append(request.tag)
        assert all(tags == list(range(20)) for tags in seen.values())

    kccl.run_threads(main, 4)


def test_a_receive_from_any_rank_hears_all_in_turn():
    def main(comm):
        if comm.rank:
            for _ in range(9):
                comm.send(np.zeros(1), 0)
        comm.barrier()
        if comm.rank:
            return
        sources = []
        for _ in range(27):
            request = comm.irecv(np.zeros(1))
            request.wait()
            sources.append(request.source)
        assert all(set(sources[i : i + 3]) == {1, 2, 3} for i in range(0, 27, 3)), sources

    kccl.run_threads(main, 4)


def test_random_programs(way):
    """Requests posted in a random order, waited for in another, equal what was sent."""

    def main(comm):
        shared, own = random.Random(7), random.Random(comm.rank)
        for _ in range(20):
            plan = [
                (shared.randrange(3), shared.randrange(3), shared.randrange(3), n)
                for n in shared.choices(LENGTHS[:-1], k=12)
            ]
            mine = []
            for number, (source, to, tag, n) in enumerate(plan):
                if comm.rank == source:
                    mine.append((comm.isend(bytes_of(n, number), to, tag), None, number))
            wanted = [(i, p) for i, p in enumerate(plan) if p[1] == comm.rank]
            # Those of one source and tag in their order; the others in any.
            keys = sorted({(p[0], p[2]) for _, p in wanted}, key=lambda _: own.random())
            for key in keys:
                for number, (source, _, tag, n) in wanted:
                    if (source, tag) == key:
                        x = np.zeros(n, np.int8)
                        mine.append((comm.irecv(x, source, tag), x, number))
            own.shuffle(mine)
            for request, x, number in mine:
                while own.random() < 0.3 and not request.test():
                    pass
                request.wait()
                if x is not None:
                    assert (x == bytes_of(plan[number][3], number)).all()

    kccl.run_threads(main, 3)


def test_group_drops_its_calls_after_an_exception():
    def main(comm):
        x = np.arange(4.0)
        with pytest.raises(ZeroDivisionError), comm.group():
            comm.send(x, 1 - comm.rank)
            raise ZeroDivisionError
        with comm.group(), comm.group():
            comm.recv(y := np.zeros(4), 1 - comm.rank)
            comm.send(x + 1, 1 - comm.rank)
            assert not y.any()
        assert (y == x + 1).all()
        # And C makes the calls again.
        for _ in range(3):
            comm.send(x, 1 - comm.rank)
            comm.recv(y, 1 - comm.rank)
        assert (y == x).all()

    kccl.run_threads(main, 2)


def test_prepared_calls():
    def main(comm):
        x, y = np.zeros(3), np.zeros(3)
        give, take = comm.send.prepare(x, 1 - comm.rank), comm.recv.prepare(y, 1 - comm.rank)
        for turn in range(100):
            x[:] = turn + comm.rank
            give()
            assert take() is y
            assert (y == turn + 1 - comm.rank).all()

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("length", [8, 50_000])
def test_lengths_differ(length):
    def main(comm):
        if comm.rank == 0:
            comm.send(np.zeros(length, np.int8), 1, tag=3)
            return
        text = (
            rf"rank 1: recv, {length + 8} bytes; rank 0: send, {length} bytes; all ranks may go on "
            r"after comm\.reset\(\)"
        )
        with pytest.raises(kccl.InvalidArgument, match=text):
            comm.recv(np.zeros(length + 8, np.int8), 0)

    if length == 8:
        kccl.run_threads(main, 2)
    else:
        # The sender waits for its receiver, and hears the reason.
        with pytest.raises(kccl.InvalidArgument, match="the ranks disagree"):
            kccl.run_threads(main, 2)


def test_time_outs_name_what_is_missing():
    over = threading.Barrier(2)

    def main(comm):
        comm.barrier()
        comm.barrier()
        if comm.rank == 0:
            comm.send(np.zeros(1), 1, tag=7)
            over.wait(20)
            return
        comm.timeout = 0.05
        text = (
            r"recv on tag 8: peer 0 did not arrive; rank 1 waited for peer 0: 1 other messages of "
            r"peer 0 have come, after 0\.0"
        )
        with pytest.raises(kccl.Timeout, match=text):
            comm.recv(np.zeros(1), 0, tag=8)
        over.wait(20)

    kccl.run_threads(main, 2)


def test_of_a_sender_that_has_closed_only_short_messages_come():
    closed = threading.Barrier(2)

    def main(comm):
        if comm.rank == 0:
            big = np.ones(100_000)
            requests = [comm.isend(np.full(3, 5.0), 1), comm.isend(big, 1, tag=1)]
            comm.close()
            big[:] = 3
            closed.wait(20)
            del requests
            return
        closed.wait(20)
        x = np.zeros(3)
        comm.recv(x, 0)
        assert (x == 5).all()
        with pytest.raises(kccl.PeerLost, match="recv on tag 1: peer 0 has closed") as caught:
            comm.recv(np.zeros(100_000), 0, tag=1)
        assert caught.value.peer == 0

    kccl.run_threads(main, 2)


def test_long_send_without_a_receiver_times_out_and_reset_forgets_it():
    def main(comm):
        big = np.ones(100_000)
        comm.barrier()
        comm.barrier()
        if comm.rank == 0:
            comm.timeout = 0.05
            with pytest.raises(kccl.Timeout, match="send on tag 0: peer 1 did not arrive"):
                comm.send(big, 1)
            comm.timeout = 20
        comm.reset()
        small = np.array([comm.rank])
        comm.send(small, 1 - comm.rank)
        comm.recv(small, 1 - comm.rank)
        assert small[0] == 1 - comm.rank

    kccl.run_threads(main, 2)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda comm, x: comm.send(x, 2), "peer is 2, must be"),
        (lambda comm, x: comm.send(x, None), "peer is None"),
        (lambda comm, x: comm.send(x, 0, -1), "tag is -1, must be"),
        (lambda comm, x: comm.send(x, 0, tag=2**31), "tag is 2147483648, must be"),
        (lambda comm, x: comm.send.prepare(x[::2], 0), "contiguous"),
        (lambda comm, x: comm.recv(memoryview(x).toreadonly(), 0), "x is read-only|writable"),
        (lambda comm, x: comm.irecv(x, 0, 1.5), "tag is 1.5"),
        (lambda comm, x: comm.isend(None, 0), "x"),
        (lambda comm, x: comm.send(x.astype(object), 0), "must have no Python objects"),
        (lambda comm, x: comm.recv(x.astype(object), 0), "must have no Python objects"),
        (lambda comm, x: comm.send(memoryview(x.astype(object)), 0), "must have no Python objects"),
    ],
)
def test_wrong_arguments(call, text):
    """Also after calls that have opened the fast path."""

    def main(comm):
        x = np.zeros(4)
        for _ in range(2):
            comm.send(x, comm.rank)
            comm.recv(x, comm.rank)
        with pytest.raises(kccl.InvalidArgument, match=text):
            call(comm, x)
        comm.send(x, comm.rank)
        comm.recv(x, comm.rank)

    kccl.run_threads(main, 2)


def test_channels_are_for_gpus():
    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match="channel is 1, must be 0 on backend host"):
            comm.send(np.zeros(1), 0, channel=1)
        # Also when C answers the calls.
        comm.send(np.zeros(1), comm.rank, channel=0)
        comm.recv(np.zeros(1), comm.rank)
        for call in (comm.send, comm.recv):
            with pytest.raises(kccl.InvalidArgument, match="channel is 1"):
                call(np.zeros(1), comm.rank, channel=1)
        with pytest.raises(kccl.InvalidArgument, match="host memory has no streams"):
            comm.recv(np.zeros(1), comm.rank, stream=5)

    kccl.run_threads(main, 2)


PROCESSES = """
comm = kccl.init()
x = np.arange(300_000) + comm.rank
y = np.zeros_like(x)
with comm.group():
    comm.send(x, (comm.rank + 1) % 3)
    comm.recv(y, (comm.rank - 1) % 3)
assert (y == np.arange(300_000) + (comm.rank - 1) % 3).all()
say(rank=comm.rank)
comm.close()
"""


def test_processes():
    code, said, err = run(3, PROCESSES)
    assert code == 0 and sorted(said) == [0, 1, 2], err


LOST = """
comm = kccl.init()
comm.barrier()
x = np.zeros({count})
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    {call}
except kccl.PeerLost as error:
    say(rank=comm.rank, text=str(error), peer=error.peer)
    comm.shrink().barrier()
"""


@pytest.mark.parametrize(
    "call, count",
    [("comm.recv(x, 1)", 1), ("comm.send(x, 1)", 100_000), ("comm.recv(x, 1)", 10**5)],
)
def test_a_lost_peer_is_named(call, count):
    code, said, err = preloaded.run(3, LOST.format(call=call, count=count))
    assert code == -9, err
    assert sorted(said) == [0, 2] and all(each["peer"] == 1 for each in said.values()), (said, err)
    assert all("the process of peer 1 has ended" in each["text"] for each in said.values())


INTERRUPTED = """
comm = kccl.init()
comm.barrier()

def interrupt(*_):
    raise ZeroDivisionError

try:
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        comm.recv(np.zeros(1))
    else:
        comm.recv(np.zeros(1), 0)
except (ZeroDivisionError, kccl.Error) as error:
    say(rank=comm.rank, text=str(error))
"""


def test_an_interrupted_receive_from_any_rank_names_no_peer():
    code, said, err = preloaded.run(2, INTERRUPTED)
    assert code == 0, err
    text = "rank 0 was interrupted; rank 0 waited for its peers: 0 other messages of its peers have"
    assert text in said[1]["text"], (said, err)
