"""Where the ranks run: one core each, told to who reads the figures.

Two ranks on one core take turns, and a call then costs what the scheduler costs. So a bench pins
its ranks, and the ranks of a second job onto the same cores.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import kccl

from ..harness.collective import Comm


@dataclass(frozen=True)
class Places:
    """Where the ranks are, the same on every rank.

    Attributes:
        pids: Process of each rank.
        cpus: Logical CPU to which each rank is pinned; None: it is not.
        allowed: All logical CPUs that a rank may use.
        note: What is not as it should be; empty if all is well.
        core_of: Logical CPU -> its core, as a number.
    """

    pids: Sequence[int]
    cpus: Sequence[int | None]
    allowed: Sequence[int]
    note: str
    core_of: Callable[[int], int]

    def lines(self, gpus: Sequence[str] = ()) -> list[str]:
        """A line for each rank, as nccl-tests has it; `gpus` are the names of the ranks' GPUs."""
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
        """Lets the processes that start inside the context use all CPUs of the job."""
        before = _allowed()
        # Where the system forbids this call, it also forbade the pinning, so nothing is to undo.
        with suppress(OSError):
            os.sched_setaffinity(0, self.allowed)
        try:
            yield
        finally:
            with suppress(OSError):
                os.sched_setaffinity(0, before)


@contextmanager
def placed(comm: Comm, *, pins: bool) -> Iterator[Places]:
    """Pins this thread inside the context, each rank to a core of its own. Collective.

    Where there are fewer cores than ranks, they share them evenly. Where the system forbids
    pinning, no rank is pinned. `note` says either.

    Args:
        comm: The communicator.
        pins: False: only says where the ranks are.
    """
    core_of = _cores()
    before = _allowed()
    told = comm.gather_objects([os.getpid(), before])
    sets = [set(cpus) for _, cpus in told]
    everything = sorted(set().union(*sets))
    cpus: list[int | None] = [None] * comm.world_size
    notes = []
    # The CPUs of a core together count once.
    available = len({core_of(cpu) for cpu in everything})
    if pins and comm.world_size > available:
        cores = f"{available} core{'s' if available > 1 else ''}"
        notes.append(
            f"{comm.world_size} ranks share {cores}: times are those of the scheduler, not of the "
            "machine"
        )
    if pins:
        chosen = assign(sets, core_of)
        forbidden = comm.gather_objects(_pin({chosen[comm.rank]}))
        reasons = [f"rank {i}: {why}" for i, why in enumerate(forbidden) if why]
        if reasons:
            _pin(before)
            notes.append(
                f"the ranks are not pinned, because the system forbids it ({reasons[0]}): two may "
                "meet on one core"
            )
        else:
            cpus = list(chosen)
    try:
        yield Places([pid for pid, _ in told], cpus, everything, "; ".join(notes), core_of)
    finally:
        if pins:
            _pin(before)


def assign(allowed: Sequence[set[int]], core_of: Callable[[int], int]) -> list[int]:
    """A logical CPU for each rank, of those that it may use.

    As many ranks as possible have a core of their own; the others are spread evenly.
    """
    of_core: dict[int, int] = {}  # core -> rank

    def settle(rank: int, refused: set[int]) -> bool:
        cores = [core for core in _cores_of(allowed[rank], core_of) if core not in refused]
        free = next((core for core in cores if core not in of_core), None)
        if free is not None:
            of_core[free] = rank
            return True
        for core in cores:
            # Its rank may have another.
            refused.add(core)
            if settle(of_core[core], refused):
                of_core[core] = rank
                return True
        return False

    ranks = range(len(allowed))
    homeless = [rank for rank in ranks if not settle(rank, set())]
    found = {rank: core for core, rank in of_core.items()}
    used = dict.fromkeys(of_core, 1)
    for rank in homeless:
        found[rank] = min(
            _cores_of(allowed[rank], core_of), key=lambda core: (used.get(core, 0), core)
        )
        used[found[rank]] = used.get(found[rank], 0) + 1
    taken: set[int] = set()
    cpus = []
    for rank in ranks:
        own = sorted(cpu for cpu in allowed[rank] if core_of(cpu) == found[rank])
        cpus.append(next((cpu for cpu in own if cpu not in taken), own[0]))
        taken.add(cpus[-1])
    return cpus


def _cores_of(cpus: Iterable[int], core_of: Callable[[int], int]) -> list[int]:
    return sorted({core_of(cpu) for cpu in cpus})


def _cores() -> Callable[[int], int]:
    """Logical CPU -> the first logical CPU of its core, by the machine's topology."""
    siblings: Mapping[int, Sequence[int]] = {
        cpu.id: cpu.smt_siblings or (cpu.id,) for cpu in kccl.topology.discover().cpus
    }
    return lambda cpu: min(siblings.get(cpu, (cpu,)))


def _allowed() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def _pin(cpus: Iterable[int]) -> str | None:
    """Why this thread cannot be pinned; None if it has been."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return str(error.strerror)
    return None
