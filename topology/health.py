"""Finds signs of faults in a probed machine: numbers out of their range, and parts that lag."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from statistics import median

from .graph import Graph
from .model import Machine
from .readings import QUANTITIES, Matrix, Range

_PAIR_LAGS = 1.15
"""A pair of GPUs lags if it is this many times slower than the median pair."""
_UNIT_LAGS = 1.25
"""A compute unit lags if its mean latency is more than this many times that of the median unit."""
_SLOW_WORD_US = 1.0
"""Far more than a cache line takes on recorded machines, which is 0.15 between two sockets."""
_ACCESS = (
    "whether the GPUs hang on different root complexes, whether MIG or confidential computing is "
    "on (nvidia-smi topo -p2p rwa), and the IOMMU and ACS of the PCIe bridges"
)
_FEWEST = 3  # pairs or units; with fewer there is no useful median


def expected(machine: Machine, known: Mapping[str, Machine]) -> tuple[str, Machine] | None:
    """Returns (name, machine) of a recorded machine with ranges for this machine's model of GPU.

    Of several it returns the one whose number of GPUs is nearest. None if there is none.
    """
    gpus = Graph(machine).gpus
    if not gpus or gpus[0].name is None:
        return None
    found = [
        (abs(len(Graph(other).gpus) - len(gpus)), name)
        for name, other in known.items()
        if other.ranges and Graph(other).gpus and Graph(other).gpus[0].name == gpus[0].name
    ]
    name = min(found)[1] if found else None
    return None if name is None else (name, known[name])


def complaints(machine: Machine, known: Mapping[str, Machine]) -> tuple[str, ...]:
    """Returns a sentence for each sign of a fault: the number, its range, and what to check.

    Args:
        machine: A machine that has been probed.
        known: Recorded machines, by name.
    """
    found = expected(machine, known)
    told = [] if found is None else _by_ranges(machine, *found)
    told += _busy_cpus(machine)
    told += _no_access(machine)
    for matrix in machine.matrices:
        if matrix.what in ("peer_us", "peer_gbps"):
            told += _slow_pairs(matrix)
        elif matrix.what == "unit_to_unit_us":
            told += _slow_units(matrix)
    return tuple(told)


def _by_ranges(machine: Machine, name: str, other: Machine) -> list[str]:
    ranges: dict[str, Range] = {each.what: each for each in other.ranges}
    told = []
    for reading in machine.readings:
        wanted = ranges.get(reading.what)
        if wanted is None or wanted.low <= reading.figure.value <= wanted.high:
            continue
        quantity = QUANTITIES[reading.what]
        told.append(
            f"{reading.of}: {quantity.text} is {reading.figure.value:.4g} {quantity.unit}, "
            f"expected {wanted.low:.4g} to {wanted.high:.4g} (as on {name}): "
            f"check {quantity.advice}"
        )
    return told + _missing_links(machine, name, other)


def _busy_cpus(machine: Machine) -> list[str]:
    rows = machine.core_to_core_us or ()
    # The slower direction of a pair counts.
    both = ((rows[i][j], rows[j][i]) for i, j in combinations(range(len(rows)), 2))
    known = [max(us for us in pair if us is not None) for pair in both if any(pair)]
    slow = sum(us > _SLOW_WORD_US for us in known)
    if not slow:
        return []
    return [
        f"{slow} of {len(known)} pairs of CPUs {'takes' if slow == 1 else 'take'} over "
        f"{_SLOW_WORD_US:g} us for a cache line, "
        f"the slowest {max(known):.1f} us; two sockets were seen to take 0.15 us: check whether "
        "other programs, or other virtual machines, use these CPUs"
    ]


def _no_access(machine: Machine) -> list[str]:
    """Returns sentences for the GPUs that cannot reach a peer's memory though NVLink or xGMI joins
    them.

    Pairs without such a link are left out, because many have no access by nature; and pairs that a
    probe has measured, because the driver is wrong then, as in virtual machines. KCCL uses no
    atomics in a peer's memory.
    """
    measured = {
        frozenset((row, column))
        for matrix in machine.matrices
        if matrix.what == "peer_us"
        for row, values in zip(matrix.rows, matrix.values, strict=True)
        for column, value in zip(matrix.columns, values, strict=True)
        if value is not None
    }
    graph, alike = Graph(machine), dict[str, list[str]]()
    for pair in machine.accesses:
        wants = {"read": pair.reads, "write": pair.writes}
        missing = [verb for verb, can in wants.items() if can is False]
        route = graph.route(pair.a, pair.b)
        is_fast = route is not None and set(route.kinds) <= {"nvlink", "xgmi"}
        if missing and is_fast and frozenset((pair.a, pair.b)) not in measured:
            alike.setdefault(" or ".join(missing), []).append(f"{pair.a} > {pair.b}")
    return [
        f"{pairs[0]}{f' and {len(pairs) - 1} more' if len(pairs) > 1 else ''}: cannot {verbs} the "
        f"peer's memory, says the driver: check {_ACCESS}"
        for verbs, pairs in alike.items()
    ]


def _missing_links(machine: Machine, name: str, other: Machine) -> list[str]:
    """Returns a sentence for each GPU with fewer links to GPUs and switches, in total, than a GPU
    of the recorded machine has.
    """
    most = max(_links_by_gpu(other).values(), default=0)
    return [
        f"{gpu}: {count} active links to GPUs and switches, expected {most} (as on {name}): check "
        f"{QUANTITIES['peer_us'].advice}"
        for gpu, count in _links_by_gpu(machine).items()
        if 0 < count < most and len(Graph(machine).gpus) == len(Graph(other).gpus)
    ]


def _links_by_gpu(machine: Machine) -> dict[str, int]:
    graph = Graph(machine)
    return {
        gpu.id: sum(
            link.count or 0 for _, link in graph.links_of(gpu.id) if link.kind in ("nvlink", "xgmi")
        )
        for gpu in graph.gpus
    }


def _slow_pairs(matrix: Matrix) -> list[str]:
    cells = [
        (row, column, value)
        for row, values in zip(matrix.rows, matrix.values, strict=True)
        for column, value in zip(matrix.columns, values, strict=True)
        if value is not None
    ]
    if len(cells) < _FEWEST:
        return []
    middle = median(value for _, _, value in cells)
    quantity = QUANTITIES[matrix.what]
    # The sign is 1 if larger numbers are worse, as microseconds, and -1 if they are better.
    sign = 1 if matrix.what == "peer_us" else -1
    limit = middle * _PAIR_LAGS**sign
    return [
        f"{a} > {b}: {quantity.text} is {value:.4g} {quantity.unit}, the median pair has "
        f"{middle:.4g}: check {quantity.advice}"
        for a, b, value in cells
        if (value - limit) * sign > 0
    ]


def _slow_units(matrix: Matrix) -> list[str]:
    means = {}
    for unit, values in zip(matrix.rows, matrix.values, strict=True):
        known = [value for value in values if value is not None]
        if known:
            means[unit] = sum(known) / len(known)
    if len(means) < _FEWEST:
        return []
    middle = median(means.values())
    quantity = QUANTITIES[matrix.what]
    return [
        f"{matrix.of}, compute unit {unit}: {quantity.text} is {mean:.4g} {quantity.unit}, the "
        f"median unit has {middle:.4g}: check {quantity.advice}"
        for unit, mean in means.items()
        if mean > middle * _UNIT_LAGS
    ]
