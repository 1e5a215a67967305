"""Which CPU each rank is pinned to, and the pinning."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from .discovery import discover


def core_of() -> Callable[[int], int]:
    """A function: logical CPU -> the first logical CPU of its core, by this machine's topology."""
    siblings: Mapping[int, Sequence[int]] = {
        cpu.id: cpu.smt_siblings or (cpu.id,) for cpu in discover().cpus
    }
    return lambda cpu: min(siblings.get(cpu, (cpu,)))


def pin(cpus: Iterable[int]) -> str | None:
    """Pins this thread, and the processes that it starts from now on.

    Returns:
        Why the system forbids it, as in a container whose seccomp profile does; None: it is pinned.
    """
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return f"sched_setaffinity is forbidden ({error.strerror})"
    return None


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
