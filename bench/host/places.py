"""Pins each rank to a core, and describes where the ranks run for readers of the figures.

Two ranks on one core take turns, and then the time of a call is that of the scheduler. So a bench
pins its ranks, and the ranks of a second job to the same cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import kccl

from ..harness.problem import Comm


@dataclass(frozen=True)
class Places:
    """Where the ranks are, the same on every rank.

    Attributes:
        pids: The process id of each rank.
        cpus: The logical CPU to which each rank is pinned; None if it is not pinned.
        allowed: All logical CPUs that any rank may use.
        note: A sentence if ranks share cores or could not be pinned; else "".
        core_of: Logical CPU -> the number of its core.
    """

    pids: Sequence[int]
    cpus: Sequence[int | None]
    allowed: Sequence[int]
    note: str
    core_of: Callable[[int], int]

    @property
    def first_two_meet(self) -> bool:
        """Whether ranks 0 and 1 share one logical CPU. Then they answer each other only when the
        scheduler lets them, some 5,000 times a second.
        """
        if len(self.cpus) == 1:
            return False
        return len(self.allowed) == 1 or (self.cpus[0] is not None and self.cpus[0] == self.cpus[1])

    def lines(self, gpus: Sequence[str] = ()) -> list[str]:
        """Returns a line for each rank, as nccl-tests has it; `gpus` are the names of the ranks'
        GPUs.
        """
        found = []
        for rank, (pid, cpu) in enumerate(zip(self.pids, self.cpus, strict=True)):
            where = "any core"
            if cpu is not None:
                core = self.core_of(cpu)
                where = f"core {core}" if core == cpu else f"core {core} (CPU {cpu})"
            if gpus:
                where = gpus[rank]
            found.append(f"# rank {rank}  pid {pid}  {where}")
        return found

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Lets processes that are started inside the context use all CPUs of the job."""
        before = _allowed()
        # If the system forbids this call, it has also forbidden the ranks to pin themselves. Then
        # they may use all CPUs already.
        kccl.topology.pin(self.allowed)
        try:
            yield
        finally:
            kccl.topology.pin(before)


@contextmanager
def placed(comm: Comm, *, pins: bool) -> Iterator[Places]:
    """Pins this thread inside the context, so that each rank has its own core. Collective.

    If there are fewer cores than ranks, ranks share cores evenly. If the system forbids pinning, no
    rank is pinned. In both cases `note` says so.

    Args:
        comm: The communicator.
        pins: Whether ranks are pinned. If not, Places only describes where the ranks are.
    """
    core_of = kccl.topology.core_of()
    before = _allowed()
    told = comm.gather_objects([os.getpid(), before])
    sets = [set(cpus) for _, cpus in told]
    everything = sorted(set().union(*sets))
    cpus: list[int | None] = [None] * comm.world_size
    notes = []
    # Counts cores: two ranks on two logical CPUs of one core would still take turns.
    available = len({core_of(cpu) for cpu in everything})
    if pins and comm.world_size > available:
        cores = f"{available} core{'s' if available > 1 else ''}"
        notes.append(
            f"{comm.world_size} ranks share {cores}: times are those of the scheduler, not of the "
            "machine, and have no floor where ranks 0 and 1 meet"
        )
    if pins:
        chosen = kccl.topology.place_cores(kccl.topology.discover(), sets, comm.layout)
        forbidden = comm.gather_objects(kccl.topology.pin({chosen[comm.rank]}))
        reasons = [f"rank {i}: {why}" for i, why in enumerate(forbidden) if why]
        if reasons:
            kccl.topology.pin(before)
            notes.append(f"the ranks are not pinned, so two may meet on one core: {reasons[0]}")
        else:
            cpus = list(chosen)
    try:
        yield Places([pid for pid, _ in told], cpus, everything, "; ".join(notes), core_of)
    finally:
        if pins:
            kccl.topology.pin(before)


def _allowed() -> list[int]:
    return sorted(os.sched_getaffinity(0))
