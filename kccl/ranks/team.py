"""Teams: ranks of a communicator that reach each other directly.

A team has at most MAX_WORLD_SIZE ranks, as many as a kernel's DeviceComm has windows. Up to that
size the ranks of a communicator are one team, and its Mesh serves them. A larger communicator has
two teams on each rank: its group, and a team across the groups (kccl/plan/grouping.py).
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from .. import topology
from ..base.abi import MAX_WORLD_SIZE
from ..base.errors import InvalidArgument
from ..base.syscalls import allowed
from .mesh import Mesh


class Connected(Protocol):
    """What a backend needs of connected ranks, whether they are a whole Mesh or a Team of some of
    its ranks. Mesh and Exchanges describe the members.
    """

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def pidfds(self) -> dict[int, int]: ...

    @property
    def end_event(self) -> int: ...

    def call(self, what: str) -> AbstractContextManager[None]:
        """See Exchanges."""

    def together(self, what: str, timeout: float) -> AbstractContextManager[ExitStack]:
        """See Exchanges."""

    def allgather(self, payload: bytes, what: str, timeout: float) -> list[bytes]:
        """See Exchanges."""

    def exchange_fds(self, fd: int, what: str, timeout: float) -> dict[int, int]:
        """See Exchanges."""


class Team:
    """Some ranks of a mesh, as a backend sees them.

    Every rank of the mesh has such a team, and all of them make the calls of their teams together.

    Attributes:
        ranks: The numbers of the team's ranks in the mesh, in the team's order.
        link: What connects these ranks.
        rank, world_size: This rank's number in the team, and the number of the team's ranks.
        pidfds, end_event: Those of the mesh. The keys are numbers in the team.
    """

    link = "shared memory"

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        assert len(ranks) <= MAX_WORLD_SIZE
        self.ranks = tuple(ranks)
        self.rank = self.ranks.index(mesh.rank)
        self.world_size = len(ranks)
        self.pidfds = {i: mesh.pidfds[each] for i, each in enumerate(ranks) if each != mesh.rank}
        self.end_event = mesh.end_event
        self._mesh = mesh

    def call(self, what: str) -> AbstractContextManager[None]:
        """See Exchanges. All ranks of the mesh make this call."""
        return self._mesh.call(what)

    @contextmanager
    def together(self, what: str, timeout: float) -> Iterator[ExitStack]:
        """See Exchanges. The call succeeds on all ranks of the team or on none."""
        with self.call(what), ExitStack() as undo:
            yield undo
            self.allgather(b"", what, timeout)
            undo.pop_all()

    def allgather(self, payload: bytes, what: str, timeout: float) -> list[bytes]:
        """See Exchanges. Returns the payloads of the team's ranks, in the team's order."""
        return self._mesh.allgather(payload, what, timeout, self.ranks)

    def exchange_fds(self, fd: int, what: str, timeout: float) -> dict[int, int]:
        """See Exchanges. Returns the descriptors of the team's ranks, by number in the team."""
        fds = self._mesh.exchange_fds(fd, what, timeout, self.ranks)
        return {self.ranks.index(peer): each for peer, each in fds.items()}


def agree_on_groups(mesh: Mesh, layout: str, timeout: float) -> topology.Groups:
    """Divides a mesh's ranks into groups, by the CPUs that each rank may use. Collective.

    Rank 0 decides for all, because processes may see different parts of the machine.

    Args:
        mesh: The ranks.
        layout: KCCL_LAYOUT, as in Env.
        timeout: Seconds that a wait may last.

    Raises:
        InvalidArgument: KCCL_LAYOUT differs between ranks.
    """
    with allowed("sched_getaffinity"):
        own = {"cpus": sorted(os.sched_getaffinity(0)), "layout": layout}
    told = mesh.allgather(json.dumps(own).encode(), "start-up", timeout)
    everyone = [json.loads(each) for each in told]
    for rank, other in enumerate(everyone):
        if other["layout"] != everyone[0]["layout"]:
            raise InvalidArgument(
                f"KCCL_LAYOUT is {everyone[0]['layout']!r} on rank 0 and {other['layout']!r} on "
                f"rank {rank}, must be the same on all ranks"
            )
    mine = b""
    if mesh.rank == 0:
        cpus = [each["cpus"] for each in everyone]
        found = topology.place(topology.discover(), mesh.world_size, cpus, layout).groups
        mine = json.dumps(found).encode()
    decided = json.loads(mesh.allgather(mine, "start-up", timeout)[0])
    return tuple(tuple(group) for group in decided)
