"""Whether a window's memory can be had is known before any rank takes it."""

import gc

import pytest

import kccl
from kccl import topology
from kccl.base import mapping, memory

MIB = 1 << 20


def test_memory_of_a_machine_is_for_all_its_ranks(monkeypatch):
    rooms = [
        topology.Room("this machine", 25000, False, "end other programs"),
        topology.Room("the limit RLIMIT_AS", 20000, True, "raise it"),
        topology.Room("the limit RLIMIT_DATA", 1, True, "raise it", is_private=True),
    ]
    monkeypatch.setattr(topology, "memory_room", lambda: rooms)
    # Windows of earlier tests do not count here.
    monkeypatch.setattr(mapping, "untouched_bytes", lambda: 0)
    memory.check_room(10000, 2)
    with pytest.raises(kccl.BackendError, match=r"10001 bytes on each of 2 ranks.* RLIMIT_AS has"):
        memory.check_room(10001, 2)
    with pytest.raises(kccl.BackendError, match=r"12501 bytes on each of 2 ranks.* this machine"):
        memory.check_room(12501, 2)
    with pytest.raises(kccl.BackendError, match=r"20001 bytes are more than .* RLIMIT_AS has left"):
        memory.check_room(20001, 1)


def test_what_is_promised_and_not_yet_written_counts(monkeypatch):
    """Windows together may not be larger than the memory, and those that are gone do not count."""

    def main(comm):
        gc.collect()
        left = mapping.untouched_bytes() + 100 * MIB
        rooms = [
            topology.Room("this machine", left, False, "end other programs"),
            # It counts what is mapped by itself.
            topology.Room("the limit RLIMIT_AS", 70 * MIB, True, "raise it", counts_mapped=True),
        ]
        monkeypatch.setattr(topology, "memory_room", lambda: rooms)
        first = comm.window(60 * MIB)
        with pytest.raises(
            kccl.BackendError, match=r"less \d+ bytes of earlier windows that nobody"
        ):
            comm.window(60 * MIB)
        # What is written has left the machine's room already; here that stays as it is.
        first.local[:] = bytes(first.nbytes)
        part = comm.split(0)
        second = part.window(60 * MIB)
        with pytest.raises(kccl.BackendError, match="nobody has written"):
            comm.window(60 * MIB)
        part.close()
        del second, part
        gc.collect()
        assert comm.window(60 * MIB).nbytes == 60 * MIB

    kccl.run_threads(main, 1)


def test_ranks_that_map_the_same_memory_count_it_once():
    def main(comm):
        gc.collect()
        comm.barrier()
        before = mapping.mapped_bytes()
        comm.barrier()
        window = comm.window(MIB)
        comm.barrier()
        grown = mapping.mapped_bytes() - before
        comm.barrier()
        return grown, window.nbytes

    assert kccl.run_threads(main, 3) == [(3 * MIB, MIB)] * 3


def test_memory_that_another_thread_unmaps_meanwhile_is_promised_to_nobody(monkeypatch):
    gone = mapping.map_shared(-1, MIB)
    address = mapping.ffi.cast("uintptr_t", mapping.ffi.from_buffer(gone))
    monkeypatch.setattr(mapping, "_mapped", {int(address): (0, MIB)})
    assert mapping.untouched_bytes() == MIB
    del gone
    gc.collect()
    monkeypatch.setattr(mapping, "_mapped", {int(address): (0, MIB)})
    assert mapping.untouched_bytes() == 0
