"""A rank's team with ranks of other nodes: csrc/host/nodes.cpp makes its steps, by MPI."""

import contextlib
import mmap
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from ..base import abi, clock
from ..base.abi import ffi, lib
from ..base.errors import Timeout
from ..ranks import mpi, sockets
from ..ranks.mesh import Mesh
from ..ranks.team import Team
from . import host_state

# Memory of MPI requests that could not be ended. It is never freed, because MPI may still use it.
LEFT_TO_MPI: list[Any] = []


class BetweenNodes:
    """One rank's part of a team of ranks of different nodes.

    Attributes:
        state: The team's KcclState.
        comm: A KcclDeviceComm without windows.
        dropping: Lock that is held while drop_memory() runs.
        is_dropped: True once drop_memory() was called.
    """

    def __init__(self, mesh: Mesh, team: Team, *, shares_cores: bool, timeout: float) -> None:
        """Connects the ranks of the team. Collective among all ranks of the mesh."""
        self.dropping = threading.RLock()
        self.is_dropped = False
        self._clearings = 0
        connections = _connect(mesh, team, timeout)
        # Each rank chooses a number, from which the MPI tags of the messages that it receives
        # follow, and tells it the others. The numbers of two ranks may differ, because threads may
        # make communicators at the same time, in another order on each rank.
        numbers = mesh.allgather(b"%d" % mpi.new_number(), "start-up", timeout)
        self._numbers = [int(numbers[number]) for number in team.ranks]
        self._nodes = ffi.new("KcclNodes *")
        for name, value in vars(mpi.functions()).items():
            setattr(self._nodes, name, value)
        self._nodes.rank, self._nodes.world_size = team.rank, team.world_size
        self._context = ffi.new("KcclHostContext *")
        for rank in range(abi.MAX_WORLD_SIZE):
            fd = connections[rank].fileno() if rank in connections else -1
            self._nodes.socket[rank] = self._context.pidfd[rank] = fd
        for rank, number in enumerate(team.ranks):
            self._nodes.mpi_rank[rank] = mesh.homes[number].mpi_rank
        self._context.watches_sockets = True
        self._context.shares_cores = shares_cores
        self._context.holds_gil = True
        self.state = host_state.new_state(self._context)
        self.comm = ffi.new("KcclDeviceComm *")
        self.comm.abi_version = abi.ABI_VERSION
        self.comm.rank = team.rank
        self.comm.state = int(ffi.cast("uintptr_t", self.state))
        self._keep: list[Any] = []
        self._renew()
        far = [rank for rank in team.ranks if rank != mesh.rank]
        tags = [self._nodes.peer_tag[team.ranks.index(rank)] for rank in far]
        meet(mesh, far, self._nodes.tag, tags, timeout)
        self._leave = weakref.finalize(
            self, _leave, self._nodes, connections, os.getpid(), self._keep
        )
        self._leave.atexit = False

    @property
    def address(self) -> int:
        """Returns the address of the KcclNodes."""
        return int(ffi.cast("uintptr_t", self._nodes))

    def _renew(self) -> None:
        """Gives the team memory and tags that no earlier step has used."""
        nodes = self._nodes
        if nodes.is_pending:
            LEFT_TO_MPI.extend(self._keep)
        self._keep.clear()
        memory = mmap.mmap(-1, max(lib.kccl_host_nodes_bytes(nodes.world_size), mmap.PAGESIZE))
        self._keep.append(memory)
        nodes.memory = int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))
        for rank, number in enumerate(self._numbers):
            nodes.peer_tag[rank] = mpi.first_tag(number, self._clearings)
        nodes.tag = nodes.peer_tag[nodes.rank]
        nodes.has_told = nodes.is_pending = 0
        for channel in range(mpi.CHANNELS):
            nodes.sequence[channel] = 0

    def leave(self) -> None:
        """See Backend."""
        lib.kccl_host_leave_nodes(self._nodes, mpi.is_usable())

    def drop_memory(self) -> None:
        """See Backend."""
        with self.dropping:
            self.is_dropped = True
            self._leave()
            for rank in range(abi.MAX_WORLD_SIZE):
                self._nodes.socket[rank] = self._context.pidfd[rank] = -1

    def clear(self) -> None:
        """See Backend."""
        self._clearings += 1
        self._renew()
        host_state.clear_state(self.state)


def meet(mesh: Mesh, far: Sequence[int], tag: int, tags: Sequence[int], timeout: float) -> None:
    """Lets MPI connect this rank with ranks of other nodes. Collective among all ranks of the mesh.

    Args:
        mesh: The ranks.
        far: The ranks of other nodes.
        tag: MPI's tag of messages to this rank.
        tags: MPI's tags of messages to each rank of `far`.
        timeout: Seconds to wait for these ranks.

    Raises:
        PeerLost: A rank of `far` has ended.
        Timeout: Ranks of `far` did not answer.
    """

    def look() -> None:
        mesh.look()
        for lost in mesh.ended() & set(far):
            raise sockets.peer_lost(mesh.rank, lost, "start-up")

    peers = [mesh.homes[rank].mpi_rank for rank in far]
    if not mpi.meet(peers, tag, tags, clock.now() + timeout, look):
        raise Timeout(
            f"rank {mesh.rank} waited {timeout:.3g} s for ranks {', '.join(map(str, far))} to "
            "answer by MPI",
            rank=mesh.rank,
            collective="start-up",
            waited_s=timeout,
        )


def _connect(mesh: Mesh, team: Team, timeout: float) -> dict[int, socket.socket]:
    """Connects this rank with the other ranks of its team by sockets, on which nodes.cpp sends
    failures and departures.
    """
    listener, name = mesh.listen()
    try:
        names = mesh.allgather(name.encode(), "start-up", timeout)
        return sockets.connect(
            team.rank,
            [names[rank].decode() for rank in team.ranks],
            listener,
            clock.now() + timeout,
            numbers=team.ranks,
            look=mesh.look,
        )
    finally:
        listener.close()


def _leave(nodes: Any, connections: dict[int, socket.socket], pid: int, memory: list[Any]) -> None:
    # A fork of the process is not the rank, so it must not tell the peers that the rank leaves.
    if os.getpid() == pid:
        # The garbage collector may call this, so it must not wait.
        lib.kccl_host_leave_nodes(nodes, False)
        if nodes.is_pending:
            LEFT_TO_MPI.extend(memory)
        for connection in connections.values():
            # shutdown() raises an error if the peer has closed its side already, which is ignored.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
    for connection in connections.values():
        connection.close()
