"""Chooses the CPU that each rank is pinned to, and pins threads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from .discovery import discover
from .model import Machine


def core_of(machine: Machine | None = None) -> Callable[[int], int]:
    """Returns a function: logical CPU -> the lowest logical CPU of its core.

    Without an argument, it is for this machine.
    """
    siblings: Mapping[int, Sequence[int]] = {
        cpu.id: cpu.smt_siblings or (cpu.id,) for cpu in (machine or discover()).cpus
    }
    return lambda cpu: min(siblings.get(cpu, (cpu,)))


def nearness(machine: Machine) -> Callable[[int], tuple[float, ...]]:
    """Returns a function: logical CPU -> a sort key that puts near CPUs beside each other.

    The key is (package, NUMA node, level-3 cache, core, id). A part that is not known is infinite,
    so it sorts last.
    """
    caches = {
        cpu: min(cache.shared_cpus or ())
        for cache in machine.caches
        if cache.level == 3
        for cpu in cache.shared_cpus or ()
    }
    first = core_of(machine)
    places = {
        cpu.id: tuple(
            math.inf if part is None else float(part)
            for part in (cpu.package, cpu.numa_node, caches.get(cpu.id), first(cpu.id), cpu.id)
        )
        for cpu in machine.cpus
    }
    return lambda cpu: places.get(cpu, (math.inf,) * 3 + (cpu, cpu))


def pin(cpus: Iterable[int]) -> str | None:
    """Pins this thread. Processes that it starts later inherit that.

    Returns:
        None, or why the system forbids it, as a container with a strict seccomp profile does.
    """
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return f"sched_setaffinity is forbidden ({error.strerror})"
    return None


def assign(
    allowed: Sequence[set[int]],
    core_of: Callable[[int], int],
    preferred: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Returns a logical CPU for each rank, out of those that the rank may use.

    As many ranks as possible get their own core. The others are spread evenly over the cores.

    Args:
        allowed: The logical CPUs that each rank may use.
        core_of: Logical CPU -> the number of its core.
        preferred: For each rank all cores in its order of preference. Default: by number.
    """
    of_core: dict[int, int] = {}  # core -> rank

    def cores_of(rank: int) -> list[int]:
        own = {core_of(cpu) for cpu in allowed[rank]}
        return sorted(own) if preferred is None else [c for c in preferred[rank] if c in own]

    def settle(rank: int, refused: set[int]) -> bool:
        cores = [core for core in cores_of(rank) if core not in refused]
        free = next((core for core in cores if core not in of_core), None)
        if free is not None:
            of_core[free] = rank
            return True
        for core in cores:
            # The rank that has this core may be able to move to another one.
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
        # min() takes the first core among those with the fewest ranks.
        found[rank] = min(cores_of(rank), key=lambda core: used.get(core, 0))
        used[found[rank]] = used.get(found[rank], 0) + 1
    taken: set[int] = set()
    cpus = []
    for rank in ranks:
        own = sorted(cpu for cpu in allowed[rank] if core_of(cpu) == found[rank])
        cpus.append(next((cpu for cpu in own if cpu not in taken), own[0]))
        taken.add(cpus[-1])
    return cpus
