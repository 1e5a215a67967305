"""How a rank's messages reach every rank of a communicator of several teams.

A team is a group of at most 8 ranks that make steps of calls together (kccl/ranks/team.py).
Messages go between any two ranks: those of one node leave them in rings of shared memory, a pair of
rings for each two ranks. Between nodes messages go by MPI. csrc/host/routes.cpp says how ranks of
different nodes learn of each other's end.
"""

import mmap
import os
import select
import weakref
from typing import Any

from ..base.abi import ffi, lib
from ..ranks import mpi
from ..ranks.mesh import Mesh
from ..ranks.team import Team
from ..ranks.windows import Window
from .attach import Probes
from .host_memory import HostMemory
from .nodes import LEFT_TO_MPI, BetweenNodes, meet

# Bytes of the ring in which a peer leaves messages for this rank. The peer may send this many bytes
# before this rank receives.
MESSAGE_BYTES = 65536


class Routes:
    """One rank's routes to all ranks, itself included.

    Attributes:
        handle: The KcclRoutes.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: Team,
        across: BetweenNodes | None,
        teams: Any,
        polls_per_check: int,
        timeout: float,
    ) -> None:
        """Makes the routes. Collective.

        Args:
            mesh: The ranks.
            group: The ranks of this rank's node, if there are several nodes.
            across: The rank's team of several nodes; None if all ranks share memory.
            teams: The rank's KcclHostTeams, which has its state.
            polls_per_check: Polls between two reads of the clock.
            timeout: Seconds to wait for the other ranks.
        """
        self._mesh = mesh
        near = tuple(range(mesh.world_size)) if across is None else group.ranks
        self._far = [rank for rank in range(mesh.world_size) if rank not in near]
        self.handle = ffi.new("KcclRoutes *")
        self.handle.rank, self.handle.world_size = mesh.rank, mesh.world_size
        self.handle.teams = int(ffi.cast("uintptr_t", teams))
        self._pairs = ffi.new("KcclDeviceComm[]", mesh.world_size)
        self.handle.pairs = int(ffi.cast("uintptr_t", self._pairs))
        pair_bytes = lib.kccl_host_pair_bytes(MESSAGE_BYTES)
        nbytes = -(-len(near) * pair_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        node = mesh if across is None else group
        self._window: Window | None = HostMemory(node).window(nbytes, "start-up", timeout)
        # Kept, because the other ranks read this rank's word now and then.
        self._probes = probes = Probes(node, timeout)
        self.handle.may_attach = probes.are_readable
        mine = near.index(mesh.rank)
        for place, rank in enumerate(near):
            self.handle.pid[rank], self.handle.probe[rank] = (
                probes.pids[place],
                probes.addresses[place],
            )
            # Each rank of a pair has a part of its window for the other one. `parts` gets the
            # addresses of the two parts, this rank's first; for C they are then ordered, the lower
            # rank's first.
            parts = [self._window.addresses[mine] + place * pair_bytes]
            if rank != mesh.rank:
                parts.append(self._window.addresses[place] + mine * pair_bytes)
            is_second = rank < mesh.rank
            own = int(is_second), len(parts), MESSAGE_BYTES, parts[:: -1 if is_second else 1]
            lib.kccl_host_fill_pair(self._pairs + rank, *own, teams.state, polls_per_check)
        self._watch()
        self._clearings = 0
        self._keep: list[mmap.mmap] = []
        self._numbers: list[int] = []
        if across is not None:
            self.handle.nodes = across.address
            # Each rank chooses a number, from which the MPI tags of messages to it follow, as in
            # BetweenNodes.
            numbers = mesh.allgather(b"%d" % mpi.new_number(), "start-up", timeout)
            self._numbers = [int(each) for each in numbers]
            for rank in self._far:
                self.handle.far |= 1 << rank
                self.handle.mpi_rank[rank] = mesh.homes[rank].mpi_rank
            self._renew()
            tags = [self.handle.peer_tag[rank] for rank in self._far]
            meet(mesh, self._far, self.handle.tag, tags, timeout)
        self._open()
        keep = self._window, self._keep, self._pairs, across, teams
        self._leave = weakref.finalize(self, _leave, self.handle, os.getpid(), keep)
        self._leave.atexit = False

    def _watch(self) -> None:
        """Gives C a descriptor for each rank that shows when the rank's process ends; -1 if there
        is none.
        """
        for rank in range(self._mesh.world_size):
            self.handle.watched[rank] = -1
            fd = self._mesh.pidfds.get(rank, -1)
            is_socket = rank in self._far or self._mesh.end_event != select.POLLIN
            if rank in self._far:
                fd = self._mesh.socket_of(rank)
            if fd < 0:
                continue
            self.handle.watched[rank] = fd
            self.handle.sockets |= is_socket << rank

    def _renew(self) -> None:
        """Gives MPI memory and tags that no earlier message has used."""
        if self.handle.is_pending:
            LEFT_TO_MPI.extend(self._keep)
        self.handle.is_pending = 0
        self._keep.clear()
        memory = mmap.mmap(-1, self._mesh.world_size * lib.kccl_host_link_bytes())
        self._keep.append(memory)
        self.handle.memory = int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))
        for rank, number in enumerate(self._numbers):
            self.handle.peer_tag[rank] = mpi.first_tag(number, self._clearings)
        self.handle.tag = self.handle.peer_tag[self._mesh.rank]

    def _open(self) -> None:
        if lib.kccl_host_open_routes(self.handle) != 0:
            raise MemoryError("no memory for the messages of a communicator")

    def open_messages(self, comm: Any) -> int:
        """Opens the rank's messages; see kccl_host_open_messages()."""
        return int(lib.kccl_host_open_routed_messages(comm, self.handle))

    def leave(self) -> None:
        """See Backend."""
        _note_mpis_end(self.handle)
        lib.kccl_host_leave_routes(self.handle, True)

    def drop(self) -> None:
        """Drops the memory, which nobody uses any more."""
        self._leave()
        self._window = None

    def clear(self) -> None:
        """Resets the routes to what they were before the first message. Called while no messages
        are open.
        """
        assert self._window is not None
        lib.kccl_host_close_routes(self.handle)
        address = self._window.addresses[self._window.mesh.rank]
        lib.kccl_host_clear_pairs(address, self._window.nbytes)
        self.handle.closed = self.handle.has_told = 0
        self._clearings += 1
        if self._far:
            self._renew()
        self._open()


def _leave(routes: Any, pid: int, keep: tuple[Any, ...]) -> None:
    # A fork of the process is not the rank, so it must not tell the peers that the rank leaves.
    if os.getpid() != pid:
        return
    _note_mpis_end(routes)
    # The garbage collector may call this, so it must not wait.
    lib.kccl_host_leave_routes(routes, False)
    lib.kccl_host_close_routes(routes)
    if routes.is_pending:
        LEFT_TO_MPI.extend(keep[1])


def _note_mpis_end(routes: Any) -> None:
    """Notes in the routes whether MPI_Finalize() was called, after which they must not call MPI."""
    routes.mpi_has_ended = bool(routes.far) and not mpi.is_usable()
