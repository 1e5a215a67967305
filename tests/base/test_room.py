"""Whether a window's memory can be had is known before any rank takes it."""

import pytest

import kccl
from kccl import topology
from kccl.base import memory


def test_memory_of_a_machine_is_for_all_its_ranks(monkeypatch):
    rooms = [
        topology.Room("this machine", 25000, False, "end other programs"),
        topology.Room("the limit RLIMIT_AS", 20000, True, "raise it"),
        topology.Room("the limit RLIMIT_DATA", 1, True, "raise it", is_private=True),
    ]
    monkeypatch.setattr(topology, "memory_room", lambda: rooms)
    memory.check_room(10000, 2)
    with pytest.raises(kccl.BackendError, match=r"10001 bytes on each of 2 ranks.* RLIMIT_AS has"):
        memory.check_room(10001, 2)
    with pytest.raises(kccl.BackendError, match=r"12501 bytes on each of 2 ranks.* this machine"):
        memory.check_room(12501, 2)
    with pytest.raises(kccl.BackendError, match=r"20001 bytes are more than .* RLIMIT_AS has left"):
        memory.check_room(20001, 1)
