"""Finds how far ranks are from each other: the latency of a word between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .distances import latencies_ns
from .graph import Graph
from .model import Machine
from .pinning import nearness

# Guessed latencies between two CPUs that were not measured, one way, in microseconds. In this order
# they are for two CPUs that share a level-3 cache, only a NUMA node, only a package, or none of
# these. The guesses only have to tell near from far.
_GUESSED_US = (0.05, 0.1, 0.15, 0.2)


def latency_of(
    machine: Machine | None, world_size: int, cpus: Sequence[Collection[int]] | None = None
) -> Callable[[int, int], float]:
    """Returns a function: (rank, peer) -> microseconds of a word, one way.

    Between CPUs it is the measured latency, or else a guess by what they share, which only tells
    near from far. If nothing is known, all peers are equally far.
    """
    if machine is None:
        return lambda rank, peer: _GUESSED_US[0]
    if cpus is not None:
        return _between_cpus(machine, [min(own, default=-1) for own in cpus])
    graph = Graph(machine)
    gpus = graph.gpus[:world_size]
    known: dict[tuple[int, int], float] = {}

    def between(rank: int, peer: int) -> float:
        if (rank, peer) not in known:
            is_there = max(rank, peer) < len(gpus)
            route = graph.route(gpus[rank].id, gpus[peer].id) if is_there else None
            known[rank, peer] = (route and route.latency_us) or _GUESSED_US[0]
        return known[rank, peer]

    return between


def _between_cpus(machine: Machine, cpus: Sequence[int]) -> Callable[[int, int], float]:
    measured = latencies_ns(machine)
    place_of = nearness(machine)
    places = [place_of(cpu)[:3] for cpu in cpus]

    def between(rank: int, peer: int) -> float:
        ns = measured.get((cpus[rank], cpus[peer]))
        if ns is not None:
            return ns / 1e3
        pairs = zip(places[rank], places[peer], strict=True)
        unlike = [one != other for one, other in pairs]
        return _GUESSED_US[3 - unlike.index(True) if True in unlike else 0]

    return between
