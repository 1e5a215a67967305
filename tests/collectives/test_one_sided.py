"""put, get, signal, wait, windows and arrays in symmetric memory."""

import threading
import time

import numpy as np
import oracle
import pytest

import kccl


@pytest.mark.parametrize("world_size", range(1, 9))
def test_ring(world_size):
    """Each rank puts to its right neighbour and signals; the neighbour's signal frees a slot."""

    def main(comm):
        count = 700
        window = comm.window(2 * count * 4)
        slots = np.frombuffer(window.local, np.int32).reshape(2, count)
        left, right = (comm.rank - 1) % world_size, (comm.rank + 1) % world_size
        for number in range(60):
            if number >= 2:
                comm.wait(signal_id=1, peer=right)
            slot = number % 2
            mine = np.full(count, comm.rank * 1000 + number, np.int32)
            comm.put(mine, right, window, offset=slot * count * 4)
            comm.signal(right, signal_id=0)
            comm.wait(signal_id=0, peer=left)
            assert (slots[slot] == left * 1000 + number).all(), number
            comm.signal(left, signal_id=1)

    kccl.run_threads(main, world_size)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_many_producers(count):
    """A wait takes as many signals as it asks for; those left over count for the next wait."""
    world_size, items = 4, 15
    done = threading.Event()

    def main(comm):
        window = comm.window(world_size * items * 8)
        # After two calls the longer time-out of first calls no longer applies.
        comm.barrier()
        comm.barrier()
        if comm.rank > 0:
            for item in range(items):
                value = np.array([comm.rank * 100 + item], np.int64)
                comm.put(value, 0, window, (comm.rank * items + item) * 8)
                comm.signal(0, signal_id=63)
            comm.wait(signal_id=2)
            assert done.wait(10)
            return
        table = np.frombuffer(window.local, np.int64).reshape(world_size, items)
        for seen in range(count, 3 * items + 1, count):
            comm.wait(signal_id=63, count=count)
            assert (table != 0).sum() >= seen
        assert (table[1:] == np.arange(1, 4)[:, None] * 100 + np.arange(items)).all()
        for peer in (1, 2, 3):
            comm.signal(peer, signal_id=2)
        expect_no_signal(comm, signal_id=63)
        done.set()

    kccl.run_threads(main, world_size)


def expect_no_signal(comm, **which):
    """The caller keeps the other ranks alive, because a wait for ranks that left is PeerLost."""
    comm.timeout = 0.02
    with pytest.raises(kccl.Timeout, match="0 signals seen, 1 wanted"):
        comm.wait(**which)


def test_wait_for_one_peer():
    """Signals of other peers or with other ids do not count, and are not lost."""

    done = threading.Event()

    def main(comm):
        comm.barrier()
        if comm.rank > 0:
            comm.signal(0, signal_id=5)
            if comm.rank == 2:
                comm.signal(0, signal_id=5)
            comm.signal(0, signal_id=6)
        comm.barrier()
        if comm.rank == 0:
            comm.wait(5, peer=2, count=2)
            comm.wait(5, peer=1)
            comm.wait(6, count=2)
            comm.signal(0, 7)
            comm.wait(7, peer=0)
            expect_no_signal(comm, signal_id=5)
            done.set()
        assert done.wait(10)

    kccl.run_threads(main, 3)


def test_signals_of_ranks_that_left():
    """Their signals count; a wait for any rank ends when no rank is left that could signal."""

    def main(comm):
        comm.barrier()
        comm.barrier()
        if comm.rank == 2:
            time.sleep(0.02)
        if comm.rank > 0:
            comm.signal(0, 4)
            return
        comm.wait(4, count=2)
        with pytest.raises(kccl.PeerLost, match="0 signals seen, 1 wanted"):
            comm.wait(4)

    kccl.run_threads(main, 3)


def test_put_is_seen_after_the_signal_and_the_barrier():
    def main(comm):
        size = 1 << 18
        window = comm.window(size)
        here = np.frombuffer(window.local, np.uint8)
        for number in range(1, 30):
            data = np.full(size, number * 2 + comm.rank, np.uint8).view(np.int32)
            other = 1 - comm.rank
            comm.put(data, other, window)
            if number % 2:
                comm.signal(other)
                comm.wait()
            else:
                comm.barrier()
            assert (here == number * 2 + other).all(), number
            comm.barrier()

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("world_size", [1, 3])
def test_get(world_size):
    def main(comm):
        window = comm.window(1000)
        np.frombuffer(window.local, np.uint8)[:] = np.arange(1000) % 251 + comm.rank
        comm.barrier()
        for peer in range(world_size):
            for offset, count in ((0, 500), (1, 3), (999, 0), (999 - 2 * 7, 7), (1000, 0)):
                memory = bytearray(2 * count + 2)
                x = np.frombuffer(memory, np.float16, count, 1)
                assert comm.get(x, peer, window, offset) is x
                want = (np.arange(offset, offset + 2 * count) % 251 + peer).astype(np.uint8)
                assert memory == b"\0" + want.tobytes() + b"\0"

    kccl.run_threads(main, world_size)


@pytest.mark.parametrize("offset", [-1, 9, 16, 17, 2**40, -(2**40)])
def test_offset_out_of_range(offset):
    def main(comm):
        window = comm.window(16)
        x = np.full(2, -1, np.int32)
        for call in (comm.put, comm.get):
            message = rf"offset is {offset} and x has 8 bytes, .* 16 bytes"
            with pytest.raises(kccl.InvalidArgument, match=message):
                call(x, 1, window, offset)
        comm.barrier()
        assert bytes(window.local) == bytes(16) and (x == -1).all()

    kccl.run_threads(main, 2)


def test_wrong_arguments():
    def main(comm):
        window, x = comm.window(16), np.zeros(2, np.int32)
        for wrong, message in (
            (lambda: comm.put(x, 2, window), "peer is 2, must be between 0 and 1"),
            (lambda: comm.get(x, -1, window), "peer is -1"),
            (lambda: comm.put(np.zeros(5, np.int32), 1, window), "x has 20 bytes"),
            (lambda: comm.put("text", 1, window), "x is a str"),
            (lambda: comm.signal(2), "peer is 2"),
            (lambda: comm.signal(1, 64), "signal_id is 64, must be between 0 and 63"),
            (lambda: comm.wait(-1), "signal_id is -1"),
            (lambda: comm.wait(0, count=0), "count is 0"),
            (lambda: comm.wait(0, count=2**31), "count is 2147483648"),
            (lambda: comm.wait(0, peer=2), "peer is 2"),
            (lambda: comm.put(x, 0.5, window), "peer is 0.5, must be an integer"),
            (lambda: comm.put(x, 1, None), "window is None, must be what comm.window"),
            (lambda: comm.get(x, 1, x), "window is array.*, must be what comm.window"),
            (lambda: comm.put(x, 1, window, None), "offset is None, must be an integer"),
            (lambda: comm.get(x, 1, window, 1.0), "offset is 1.0, must be an integer"),
            (lambda: comm.signal("1"), "peer is '1', must be an integer"),
            (lambda: comm.signal(1, 2.0), "signal_id is 2.0, must be an integer"),
            (lambda: comm.wait(None), "signal_id is None, must be an integer"),
            (lambda: comm.wait(0, count=1.5), "count is 1.5, must be an integer"),
            (lambda: comm.wait(0, peer="0"), "peer is '0', must be an integer"),
        ):
            with pytest.raises(kccl.InvalidArgument, match=message):
                wrong()
        frozen = np.zeros(2, np.int32)
        frozen.flags.writeable = False
        comm.put(frozen, 1 - comm.rank, window)
        with pytest.raises(kccl.InvalidArgument, match="x is read-only"):
            comm.get(frozen, 0, window)

    kccl.run_threads(main, 2)


@pytest.mark.parametrize("sizes", [(8, 8, 16), (16, 8, 8), (0, 8, 8), (0, 0, 0), (-1, -1, -1)])
def test_window_sizes(sizes):
    """A wrong size on one rank is InvalidArgument on all ranks, which then go on together."""

    def main(comm):
        with pytest.raises(kccl.InvalidArgument, match="nbytes is"):
            comm.window(sizes[comm.rank])
        window = comm.window(24)
        comm.put(np.array([comm.rank], np.int64), (comm.rank + 1) % 3, window, 8)
        comm.barrier()
        assert np.frombuffer(window.local, np.int64)[1] == (comm.rank - 1) % 3

    kccl.run_threads(main, 3)


def test_symmetric_arrays():
    """comm.empty() gives zeros, for use in every collective; they outlive the communicator."""

    def main(comm):
        arrays = [comm.empty((3, 700), dtype) for dtype in (kccl.float32, "bfloat16", np.int64)]
        arrays.append(comm.empty(5))
        assert comm.empty((0, 3), kccl.float64).shape == (0, 3)
        for salt, x in enumerate(arrays):
            assert not x.any() and x.flags.c_contiguous and x.flags.writeable
            name = x.dtype.name
            inputs = [oracle.exact(name, "sum", x.size, rank, salt) for rank in range(3)]
            x.ravel()[:] = inputs[comm.rank]
            comm.all_reduce(x)
            oracle.assert_same(x.ravel(), oracle.all_reduce(inputs, "sum"), name)
            x[:] = comm.rank
            comm.broadcast(x, 2)
            assert (x == 2).all()
        comm.close()
        for x in arrays:
            x[:] = 3
            assert (x == 3).all()

    kccl.run_threads(main, 3)
