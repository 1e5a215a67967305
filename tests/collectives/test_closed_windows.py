"""window.close(): memory is free at once, arrays stay valid, later uses are errors."""

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from ranks import run

import kccl

BACKENDS = ("host", "sim")
NBYTES = 1 << 20


def is_mapped(address):
    """Whether this process maps an address."""
    spans = (
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    )
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_memory_is_free_at_once(backend):
    def main(comm):
        before, window = comm.window(64), comm.window(NBYTES)
        peer, x = 1 - comm.rank, np.ones(4)
        for _ in range(2):  # C makes the second call of each kind
            comm.put(x, peer, window)
            comm.get(x, peer, window)
            comm.barrier()
        addresses = window.addresses
        assert all(map(is_mapped, addresses))
        comm.barrier()
        window.close()
        window.close()
        comm.barrier()
        mapped = [is_mapped(each) for each in addresses]
        comm.put(x, peer, before)
        comm.barrier()
        return mapped, float(np.frombuffer(before.local)[3])

    assert kccl.run_threads(main, 2, backend=backend) == [([False] * 2, 1.0)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_later_uses_say_that_it_is_closed(backend):
    def main(comm):
        window, x, peer = comm.window(64), np.ones(4), 1 - comm.rank
        prepared = [call.prepare(x, peer, window) for call in (comm.put, comm.get)]
        for _ in range(2):
            comm.put(x, peer, window)
            comm.get(x, peer, window)
            for op in prepared:
                op()
        window.close()
        uses = {
            "put": lambda: comm.put(x, peer, window),
            "get": lambda: comm.get(x, peer, window),
            "prepare": lambda: comm.put.prepare(x, peer, window),
            "prepared put": prepared[0],
            "prepared get": prepared[1],
            "time": lambda: prepared[0].time(3),
            "local": lambda: window.local,
            "addresses": lambda: window.addresses,
            "clear": window.clear,
            "for_kernels": window.for_kernels,
        }
        for name, use in uses.items():
            with pytest.raises(kccl.InvalidArgument, match=r"window .* 64 bytes .*closed") as told:
                use()
            assert f"rank {comm.rank} has closed" in str(told.value), name
        comm.barrier()

    kccl.run_threads(main, 2, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arrays_over_a_closed_window_stay_valid(backend):
    def main(comm):
        window = comm.window(NBYTES)
        address = window.addresses[comm.rank]
        array = np.frombuffer(window.local, np.float32)
        array[:] = comm.rank + 1
        window.close()
        assert is_mapped(address) and (array == comm.rank + 1).all()
        comm.barrier()
        del array
        gc.collect()
        return is_mapped(address)

    assert kccl.run_threads(main, 2, backend=backend) == [False] * 2


def test_all_ranks_close_the_same_window():
    def main(comm):
        windows = [comm.window(64), comm.window(128)]
        named = [f"number {1 + rank}, of {64 << rank} bytes on rank {rank}" for rank in range(2)]
        first = comm.rank
        message = f"window is {named[first]} and {named[1 - first]}"
        with pytest.raises(kccl.InvalidArgument, match=message):
            windows[comm.rank].close()
        comm.put(np.ones(2), 0, windows[0])  # neither is closed
        windows[0].close()
        return [each.is_closed for each in windows]

    assert kccl.run_threads(main, 2) == [[True, False]] * 2


def test_a_rank_that_does_not_close_is_named():
    is_done = threading.Event()

    def main(comm):
        window = comm.window(64)
        comm.barrier()
        if comm.rank == 1:
            return is_done.wait(30)
        comm.timeout = 0.2
        with pytest.raises(kccl.Timeout, match=r"rank 1 during window\.close"):
            window.close()
        is_done.set()
        return not window.is_closed

    assert kccl.run_threads(main, 2) == [True] * 2


def test_after_the_communicator_a_rank_closes_its_windows_alone():
    def main(comm):
        window = comm.window(NBYTES)
        address = window.addresses[comm.rank]
        comm.barrier()
        comm.close()
        if comm.rank == 0:
            window.close()
        return window.is_closed, is_mapped(address)

    assert kccl.run_threads(main, 2)[0] == (True, False)


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_run_threads_close_gives_the_memory_back(backend):
    windows = kccl.run_threads(lambda comm: comm.window(NBYTES), 2, backend=backend)
    addresses = windows[0].addresses
    for window in windows:
        window.close()
    assert [is_mapped(each) for each in addresses] == [False] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_keeps_no_communicator_that_is_dropped(backend):
    """The peers of a communicator that is collected are told, while its windows live."""

    def main(comm):
        part = comm.split(0)
        window = part.window(64)
        array = np.frombuffer(part.empty(4).data, np.float32)
        part.barrier()
        if comm.rank == 1:
            dropped = weakref.ref(part)
            del part
            gc.collect()
            assert dropped() is None
            window.close()  # alone
            return array.size, window.is_closed
        with pytest.raises(kccl.PeerLost, match="peer 1 has closed or dropped the communicator"):
            part.barrier()
        with pytest.raises(kccl.PeerLost, match=r"1 .*dropped the communicator without close"):
            part.reset()
        return None

    assert kccl.run_threads(main, 2, backend=backend)[1] == (4, True)


def test_processes_free_all_parts():
    program = """
comm = kccl.init()
window = comm.window(1 << 20)
def parts():
    spans = [line.split()[0] for line in open("/proc/self/maps")]
    begins = [int(span.split("-")[0], 16) for span in spans]
    return [begin in begins for begin in addresses]
addresses = window.addresses
before = parts()
window.close()
say(rank=comm.rank, before=before, after=parts())
"""
    code, said, err = run(2, program)
    assert code == 0, err
    assert [said[rank]["before"] for rank in range(2)] == [[True, True]] * 2
    assert [said[rank]["after"] for rank in range(2)] == [[False, False]] * 2
