"""The out-of-band connection of ranks that share a simulated machine.

The machine moves only while no rank may still launch something, so it must know which ranks wait
for others in here. A rank has waited until the last of those it meets has come, not until its own
thread has noticed: so that what the machine does depends on the program and not on threads' pace.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..base.errors import WaitFailed
from ..ranks.mesh import Mesh
from .machine import Machine


class Meetings:
    """Who waits for whom; shared by all ranks of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._lock = threading.Lock()
        # By name of the mesh, kind and number of the exchange.
        self._waiting: dict[tuple[str, bytes, int], set[int]] = {}

    @contextmanager
    def meet(self, key: tuple[str, bytes, int], rank: int, members: set[int]) -> Iterator[None]:
        """Within, a rank waits for all `members`, which all name the same key."""
        with self._lock:
            arrived = self._waiting.setdefault(key, set())
            if arrived | {rank} >= members:
                self.machine.meet(rank, self._waiting.pop(key))
            else:
                arrived.add(rank)
                self.machine.wait_outside(rank)
        try:
            yield
        finally:
            with self._lock:
                still = self._waiting.get(key, set())
                # Unless the last one has come and ended it for all.
                if rank in still:
                    self.machine.return_inside(rank)
                    still.remove(rank)
                    if not still:
                        del self._waiting[key]

    def end_all(self, name: str) -> None:
        """Whoever waits in this mesh is about to hear that it waits in vain."""
        with self._lock:
            for key in [key for key in self._waiting if key[0] == name]:
                for rank in self._waiting.pop(key):
                    self.machine.return_inside(rank)


class SimMesh(Mesh):
    """A mesh of ranks that are threads of this process and share a machine.

    Attributes:
        meetings: The machine's.
        machine_ranks: Each rank's number on the machine.
    """

    def __init__(
        self,
        rank: int,
        sockets: dict[int, socket.socket],
        *,
        meetings: Meetings,
        machine_ranks: list[int],
        name: str = "",
    ) -> None:
        """The ranks of `machine_ranks`, of which this is number `rank`; all give one name."""
        self.meetings = meetings
        self.machine_ranks = machine_ranks
        self._name = name
        super().__init__(rank, len(machine_ranks), sockets)

    @property
    def machine_rank(self) -> int:
        """This rank's number on the machine."""
        return self.machine_ranks[self.rank]

    def part(
        self, rank: int, members: list[int], name: str, sockets: dict[int, socket.socket]
    ) -> "SimMesh":
        """See Mesh.part."""
        return SimMesh(
            rank,
            sockets,
            meetings=self.meetings,
            machine_ranks=[self.machine_ranks[member] for member in members],
            name=name,
        )

    def _exchange(
        self,
        kind: bytes,
        sequence: int,
        payload: bytes | None,
        what: str,
        timeout: float,
        links: Any,
    ) -> dict[int, bytes]:
        peers = {self.machine_ranks[peer] for peer, link in links.items() if link.is_open}
        key = self._name, kind, sequence
        try:
            with self.meetings.meet(key, self.machine_rank, {self.machine_rank, *peers}):
                return super()._exchange(kind, sequence, payload, what, timeout, links)
        except WaitFailed:
            # The peer has gone because of what the machine has found.
            cause = self.meetings.machine.failure()
            if cause is not None:
                raise cause from None
            raise

    def hang_up(self) -> None:
        self.meetings.end_all(self._name)
        super().hang_up()

    def close(self) -> None:
        self.meetings.end_all(self._name)
        super().close()


def thread_meshes(machine: Machine, streams: list[dict[int, socket.socket]]) -> list[Mesh]:
    """The meshes of all ranks of a machine, in rank order; `streams` are each rank's by peer."""
    meetings, ranks = Meetings(machine), list(range(len(streams)))
    return [SimMesh(rank, streams[rank], meetings=meetings, machine_ranks=ranks) for rank in ranks]
