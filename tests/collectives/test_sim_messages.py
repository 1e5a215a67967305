"""send, recv, isend, irecv and group on the simulator, which runs the code of GPUs."""

from contextlib import nullcontext

import numpy as np
import pytest

import kccl

# Bytes that packets take whole, one more than a step of packets, and several chunks.
LENGTHS = (0, 1, 8, 1001, 4081, 70000)


def run(main, world_size=2, **options):
    return kccl.run_threads(main, world_size, backend="sim", **options)


def data(nbytes, sender, number=0):
    return np.random.default_rng([nbytes, sender, number]).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
def test_messages_of_any_length_come_in_order(world_size):
    """Around a ring; rank 0 sends first. Other calls stand between."""

    def main(comm):
        right, left = (comm.rank + 1) % world_size, (comm.rank - 1) % world_size
        for number, nbytes in enumerate(LENGTHS if world_size < 4 else LENGTHS[:4]):
            x, y = data(nbytes, comm.rank, number), np.zeros(nbytes, np.uint8)
            if comm.rank == 0:
                assert comm.send(x, right) is None
            assert comm.recv(y, left) is y
            if comm.rank != 0:
                comm.send(x, right)
            assert (y == data(nbytes, left, number)).all()
            if number % 2:
                assert comm.all_reduce(np.ones(3, np.float32))[0] == world_size

    run(main, world_size, seed=world_size)


def test_a_message_needs_nobody_else():
    def main(comm):
        for number in range(5):
            if comm.rank == 0:
                comm.send(data(9000, 0, number), 2)
            elif comm.rank == 2:
                assert (comm.recv(np.zeros(9000, np.uint8), 0) == data(9000, 0, number)).all()
        # Rank 1 has made no call yet.
        return float(comm.all_reduce(np.ones(1, np.float32))[0])

    assert run(main, 3) == [3] * 3


@pytest.mark.parametrize("dtype", ["float16", "complex128", "bool", "U3", "M8[s]"])
def test_elements_of_any_type(dtype):
    def main(comm):
        x = np.arange(7).astype(dtype) if dtype != "M8[s]" else np.arange(7).view(dtype)
        if comm.rank == 0:
            comm.send(x, 1)
        else:
            assert (comm.recv(np.empty(7, dtype), 0) == x).all()

    run(main)


def test_four_short_messages_are_buffered():
    def main(comm):
        for _ in range(7):
            for value in (1, 2, 3, 4):
                comm.send(np.full(4, value), comm.rank)
            for value in (1, 2, 3, 4):
                assert (comm.recv(np.zeros(4, int), comm.rank) == value).all()

    run(main, 1)


@pytest.mark.parametrize("nbytes", [100, 60000])
def test_a_group_is_made_together(nbytes):
    """All to all, to itself too, long enough that one by one they would wait for each other."""

    def main(comm):
        ranks = range(comm.world_size)
        got = [np.zeros(nbytes, np.uint8) for _ in ranks]
        for number in range(2):
            with comm.group():
                for peer in ranks:
                    comm.send(data(nbytes, comm.rank, 10 * peer + number), peer)
                    comm.recv(got[peer], peer)
                assert not got[0].any() or number
            for peer in ranks:
                assert (got[peer] == data(nbytes, peer, 10 * comm.rank + number)).all()

    run(main, 3)


def test_several_messages_of_a_pair_in_a_group():
    def main(comm):
        peer = 1 - comm.rank
        got = [np.zeros(500 * number, np.uint8) for number in range(4)]
        with comm.group():
            for number, y in enumerate(got):
                comm.send(data(y.size, comm.rank, number), peer)
            with comm.group():
                for y in got:
                    comm.recv(y, peer)
        assert all((y == data(y.size, peer, number)).all() for number, y in enumerate(got))

    run(main)


def test_an_exception_drops_a_group():
    def main(comm):
        peer = 1 - comm.rank
        with pytest.raises(KeyError), comm.group():
            comm.send(np.zeros(3), peer)
            raise KeyError
        with comm.group():
            comm.send(np.full(3, comm.rank), peer)
            y = comm.recv(np.zeros(3, int), peer)
        assert (y == peer).all()

    run(main)


def test_begun_messages_are_issued_by_the_next_wait():
    def main(comm):
        peer = 1 - comm.rank
        x, y, z = data(50000, comm.rank), np.zeros(50000, np.uint8), np.zeros(2)
        requests = comm.isend(x, peer), comm.irecv(y, peer), comm.isend(np.ones(2), peer)
        assert not any(each.is_done for each in requests) and requests[1].source is None
        last = comm.irecv(z, peer)
        assert last.wait() is z and z[1] == 1
        assert all(each.is_done and each.test() for each in requests)
        assert requests[1].wait() is y and (y == data(50000, peer)).all()
        assert (requests[1].source, requests[1].tag) == (peer, None)
        assert requests[0].source is None
        # A call behind them comes behind them.
        first = comm.isend(np.full(1, 1), peer)
        with comm.group():
            comm.send(np.full(1, 2), peer)
            got = [comm.recv(np.zeros(1, int), peer) for _ in range(2)]
        assert first.is_done and [int(each[0]) for each in got] == [1, 2]

    run(main)


def test_prepared_messages():
    def main(comm):
        x, y = np.zeros(3000), np.zeros(3000)
        op = comm.recv.prepare(y, 0) if comm.rank else comm.send.prepare(x, 1)
        assert op.plan.name == ("recv" if comm.rank else "send")
        for number in range(6):
            x[:] = number
            assert op() is (y if comm.rank else None)
            assert comm.rank == 0 or (y == number).all()

    run(main)


def test_channels_keep_messages_apart():
    def main(comm):
        if comm.rank == 0:
            comm.send(np.full(2, 1), 1, channel=1)
            comm.send(np.full(2, 2), 1)
        else:
            assert comm.recv(np.zeros(2, int), 0)[0] == 2
            assert comm.recv(np.zeros(2, int), 0, channel=1)[0] == 1

    run(main)


@pytest.mark.parametrize("nbytes", [24, 20_000])
def test_receives_from_any_rank(nbytes):
    """The request says from which rank; the order of tags is the receiver's."""

    def main(comm):
        size = comm.world_size
        if comm.rank:
            comm.send(data(nbytes, comm.rank), 0, tag=comm.rank)
            comm.send(data(nbytes, comm.rank, 1), 0, tag=100)
        else:
            x = np.zeros(nbytes, np.uint8)
            for tag in range(size - 1, 0, -1):
                assert comm.recv(x, tag=tag) is x and (x == data(nbytes, tag)).all()
            sources = set()
            for _ in range(1, size):
                request = comm.irecv(x, tag=100)
                assert request.source is None and request.wait() is x and request.tag == 100
                assert (x == data(nbytes, request.source, 1)).all()
                sources.add(request.source)
            assert sources == set(range(1, size))
        # Around, in groups: each sends and receives at once. A prepared call receives again.
        right, left = (comm.rank + 1) % size, (comm.rank - 1) % size
        y = np.zeros(nbytes, np.uint8)
        for number in range(2):
            with comm.group():
                comm.send(data(nbytes, comm.rank, number), right)
                comm.recv(y)
            assert (y == data(nbytes, left, number)).all()
        op = comm.recv.prepare(y[:16])
        for number in range(2):
            comm.send(data(16, comm.rank, number), right)
            op()
            assert (y[:16] == data(16, left, number)).all()

    run(main, 4)


def test_sends_beside_several_receives_from_any_rank_are_refused():
    """They could wait for each other in a circle. One at a time they do not."""
    nbytes, text = 1000, "peer is None in 2 receives that would be issued together with sends"

    def main(comm):
        others = [rank for rank in range(3) if rank != comm.rank]
        x, got = data(nbytes, comm.rank), [np.zeros(nbytes, np.uint8) for _ in others]
        for is_prepared in (False, True):
            refused = pytest.raises(kccl.InvalidArgument, match=text)
            with refused, comm.group(prepare=is_prepared):
                for peer, y in zip(others, got, strict=True):
                    comm.send(x, peer)
                    comm.recv(y)
        # A message that the begun ones refuse is not begun, and the others go on.
        first = comm.irecv(got[0])
        for peer in others:
            comm.isend(x, peer)
        with pytest.raises(kccl.InvalidArgument, match=text):
            comm.irecv(got[1])
        first.wait()
        second = comm.irecv(got[1])
        second.wait()
        assert {first.source, second.source} == set(others)
        for y, request in zip(got, (first, second), strict=True):
            assert (y == data(nbytes, request.source)).all()

    run(main, 3)


REFUSED = {
    "tag": (
        lambda comm, x: comm.send(x, 0, tag=65535),
        "tag is 65535, must be between 0 and 65534",
    ),
    "tag of recv": (lambda comm, x: comm.irecv(x, 0, -1), "tag is -1, must be between 0 and 65534"),
    "any": (lambda comm, x: receive_from_all(comm, x), "peer is None in a receive of a group"),
    "no peer": (lambda comm, x: comm.send(x, None), "peer is None"),
    "far peer": (lambda comm, x: comm.isend(x, 2), "peer is 2, must be between 0 and 1"),
    "channel": (lambda comm, x: comm.send(x, 0, channel=9), "channel is 9"),
    "stream": (lambda comm, x: comm.send(x, 0, stream=1), "host memory has no streams"),
    "strided": (lambda comm, x: comm.irecv(x[::2], 0), "contiguous"),
    "strided in a prepared group": (lambda comm, x: prepared_send(comm, x[::2]), "contiguous"),
}


def receive_from_all(comm, x):
    with comm.group():
        for peer in (0, 1, None):
            comm.recv(x, peer)


def prepared_send(comm, x):
    with comm.group(prepare=True):
        comm.send(x, comm.rank)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_changes_nothing(what):
    call, text = REFUSED[what]

    def main(comm):
        x = np.zeros(4)
        with pytest.raises(kccl.InvalidArgument, match=text):
            call(comm, x)
        comm.send(x, comm.rank)
        comm.recv(x, comm.rank)

    run(main)


@pytest.mark.parametrize(
    ("sent", "received", "text"),
    [
        ((40, 0), (48, None), "rank 1: recv, any tag, 48 bytes; rank 0: send, 40 bytes"),
        ((40, 3), (40, 4), "rank 1: recv, tag 4, 40 bytes; rank 0: send, tag 3, 40 bytes"),
        ((9000, 0), (9000, 7), "rank 1: recv, tag 7, 9000 bytes; rank 0: send, 9000 bytes"),
    ],
)
def test_lengths_and_tags_that_differ_are_named(sent, received, text):
    def main(comm):
        if comm.rank == 0:
            comm.send(np.zeros(sent[0], np.uint8), 1, sent[1])
        else:
            comm.recv(np.zeros(received[0], np.uint8), 0, received[1])

    with pytest.raises(kccl.InvalidArgument, match=text):
        run(main)


def test_tags_order_the_messages_of_a_group_and_those_that_are_begun():
    """The receiver names them in another order than the sender."""

    def main(comm):
        peer = 1 - comm.rank
        for begun in (False, True):
            got = {tag: np.zeros(600, int) for tag in (1, 65534, 0)}
            send, recv = (comm.isend, comm.irecv) if begun else (comm.send, comm.recv)
            with nullcontext() if begun else comm.group():
                for tag in (65534, 0, 1):
                    send(np.full(600, tag + comm.rank), peer, tag)
                last = [recv(y, peer, tag) for tag, y in got.items()][-1]
            if begun:
                last.wait()
            assert all((y == tag + peer).all() for tag, y in got.items())

    run(main)


def test_a_receive_that_takes_any_tag():
    def main(comm):
        comm.send(np.full(3, comm.rank), 1 - comm.rank, tag=9)
        y = np.zeros(3, int)
        request = comm.irecv(y, 1 - comm.rank)
        assert request.wait() is y and y[0] == 1 - comm.rank
        assert (request.source, request.tag) == (1 - comm.rank, None)

    run(main)


@pytest.mark.parametrize(
    ("is_send", "nbytes", "text"),
    [
        (False, 8, r"recv on channel 2: peer 1 did not arrive; rank 0 waited for peer 1"),
        (True, 90000, r"send on channel 2: peer 1 did not arrive; rank 0 waited for peer 1"),
    ],
)
def test_a_peer_that_does_not_come_is_named_and_reset_recovers(is_send, nbytes, text):
    def main(comm):
        x = data(nbytes, 0)
        forgotten = comm.isend(x, 0) if comm.rank else None
        if comm.rank == 0:
            comm.timeout = 0.01
            with pytest.raises(kccl.Timeout, match=text):
                (comm.send if is_send else comm.recv)(x, 1, channel=2)
        comm.reset()
        if comm.rank:
            with pytest.raises(kccl.Error, match=r"reset\(\) has dropped this send of"):
                forgotten.wait()
        for channel in (2, 0):
            with comm.group():
                comm.send(x, 1 - comm.rank, channel=channel)
                y = comm.recv(np.zeros_like(x), 1 - comm.rank, channel=channel)
            assert (y == x).all()

    run(main)


def test_survivors_send_to_each_other():
    def main(comm):
        comm.send(np.zeros(1), (comm.rank + 1) % 3)
        comm.recv(np.zeros(1), (comm.rank - 1) % 3)
        if comm.rank == 1:
            comm.close()
            return
        smaller = comm.shrink()
        with smaller.group():
            smaller.send(np.full(9000, comm.rank), 1 - smaller.rank)
            y = smaller.recv(np.zeros(9000, int), 1 - smaller.rank)
        assert (y == 2 - comm.rank).all()

    run(main, 3)
