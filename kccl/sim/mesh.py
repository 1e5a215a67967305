"""The out-of-band connection of ranks that share a simulated machine.

The machine runs only while no rank may launch something new. So the machine must know which ranks
wait for others outside of it, in exchanges of the mesh. A meeting is such an exchange: it ends for
all its ranks when the last rank comes, not when each rank's thread notices. So what the machine
does depends on the program only, and not on the speed of threads.
"""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..base.errors import WaitFailed
from ..ranks.mesh import Mesh
from .machine import Machine


class Meetings:
    """The meetings of all ranks of a machine.

    Attributes:
        machine: The machine.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._lock = threading.Lock()
        # (name of the mesh, kind and number of the exchange) -> the ranks that wait in it.
        self._waiting: dict[tuple[str, bytes, int], set[int]] = {}

    @contextmanager
    def meet(self, key: tuple[str, bytes, int], rank: int, members: set[int]) -> Iterator[None]:
        """Returns a context in which a rank waits for `members`. All of them pass the same key."""
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
                # If the last member has come, it has ended the meeting, and the rank is in the set
                # no longer.
                if rank in still:
                    self.machine.return_inside(rank)
                    still.remove(rank)
                    if not still:
                        del self._waiting[key]

    def end_all(self, name: str) -> None:
        """Ends all meetings of the mesh of this name, whose ranks are about to get an error."""
        with self._lock:
            for key in [key for key in self._waiting if key[0] == name]:
                for rank in self._waiting.pop(key):
                    self.machine.return_inside(rank)


class SimMesh(Mesh):
    """A mesh of ranks that are threads of this process and share a machine.

    Attributes:
        meetings: The machine's meetings.
        machine_ranks: Each rank's number on the machine, in rank order.
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
        """Makes the mesh of `machine_ranks`, for number `rank` of them. All pass the same name."""
        self.meetings = meetings
        self.machine_ranks = machine_ranks
        self._name = name
        super().__init__(rank, len(machine_ranks), sockets)

    @property
    def machine_rank(self) -> int:
        """Returns this rank's number on the machine."""
        return self.machine_ranks[self.rank]

    def part(
        self, rank: int, members: list[int], name: str, sockets: dict[int, socket.socket]
    ) -> "SimMesh":
        """See Mesh.part."""
        part = SimMesh(
            rank,
            sockets,
            meetings=self.meetings,
            machine_ranks=[self.machine_ranks[member] for member in members],
            name=name,
        )
        part.numbers = members
        return part

    @contextmanager
    def _meeting(self, kind: bytes, number: int) -> Iterator[None]:
        peers = {self.machine_ranks[peer] for peer in set(self.pidfds) - self.ended()}
        key = self._name, kind, number
        try:
            with self.meetings.meet(key, self.machine_rank, {self.machine_rank, *peers}):
                yield
        except WaitFailed:
            # The peer may have left because the simulator found a bug. Then that finding is raised.
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
    """Returns the meshes of all ranks of a machine, in rank order.

    Args:
        machine: The machine.
        streams: For each rank {peer: socket}.
    """
    meetings, ranks = Meetings(machine), list(range(len(streams)))
    return [SimMesh(rank, streams[rank], meetings=meetings, machine_ranks=ranks) for rank in ranks]
