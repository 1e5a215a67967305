"""Groups measured latencies by what the two CPUs share: a core, a cache, a NUMA node and so on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from .model import Cpu, Machine

NOT_MEASURED = "core-to-core latency is not measured: `kccl topo --probe --cpus 8` measures it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distance:
    """Latencies in nanoseconds of all measured ordered pairs of CPUs with the same relation."""

    relation: str
    num_pairs: int
    min_ns: float
    median_ns: float
    max_ns: float


def measured_cpus(machine: Machine) -> list[Cpu]:
    """Return the CPUs with a measured latency, so that near CPUs are neighbours in the list.

    Args:
        machine: A machine.

    Returns:
        CPUs by package, NUMA node, core and id. CPUs whose package, node or core is unknown come
        last. Empty when nothing has been measured.
    """
    measured = {cpu for pair in latencies_ns(machine) for cpu in pair}

    def position(cpu: Cpu) -> tuple[float, ...]:
        parts = (cpu.package, cpu.numa_node, cpu.core_id, cpu.id)
        return tuple(float("inf") if part is None else part for part in parts)

    return sorted((cpu for cpu in machine.cpus if cpu.id in measured), key=position)


def latencies_ns(machine: Machine) -> dict[tuple[int, int], float]:
    """Return the measured one-way latencies in nanoseconds, by (from CPU id, to CPU id)."""
    return {
        (a.id, b.id): us * 1e3
        for a, row in zip(machine.cpus, machine.core_to_core_us or (), strict=False)
        for b, us in zip(machine.cpus, row, strict=True)
        if us is not None
    }


def distances(machine: Machine) -> list[Distance]:
    """Summarise the measured latencies by relation, nearest relation first."""
    by_id = {cpu.id: cpu for cpu in machine.cpus}
    shared: dict[frozenset[int], int] = {}
    for cache in sorted(machine.caches, key=lambda cache: -cache.level):
        for pair in _pairs(cache.shared_cpus or ()):
            shared[pair] = cache.level  # caches of lower levels come later and overwrite
    alike: dict[tuple[int, str], list[float]] = {}
    for (a, b), ns in latencies_ns(machine).items():
        relation = _relation(by_id[a], by_id[b], shared.get(frozenset((a, b))))
        alike.setdefault(relation, []).append(ns)
    return [
        Distance(
            relation=name,
            num_pairs=len(values),
            min_ns=min(values),
            median_ns=median(values),
            max_ns=max(values),
        )
        for (_, name), values in sorted(alike.items())
    ]


def _relation(a: Cpu, b: Cpu, shared_level: int | None) -> tuple[int, str]:
    """Return the relation of two CPUs: a number that is small for near CPUs, and its name."""
    if a.smt_siblings is not None and b.id in a.smt_siblings:
        return 0, "same core (SMT)"
    # Compares packages before caches, because a virtual machine may report one cache for all
    # packages.
    if None not in (a.package, b.package) and a.package != b.package:
        return 102, "other package"
    if None not in (a.numa_node, b.numa_node) and a.numa_node != b.numa_node:
        return 101, "other NUMA node"
    if shared_level is not None:
        return shared_level, f"shared L{shared_level}"
    if a.numa_node is not None and a.numa_node == b.numa_node:
        return 100, "same NUMA node"
    return 103, "relation unknown"


def _pairs(cpus: tuple[int, ...]) -> Iterator[frozenset[int]]:
    for i, a in enumerate(cpus):
        for b in cpus[i + 1 :]:
            yield frozenset((a, b))
