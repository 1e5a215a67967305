"""Puts the ranks of one machine into groups whose members are close to each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import pairwise

from .model import Machine

Groups = tuple[tuple[int, ...], ...]


def groups(
    machine: Machine | None,
    cpus_of_ranks: Sequence[Collection[int]] | None,
    world_size: int,
    most: int = 8,
) -> Groups:
    """Return the ranks in groups of at most `most`, by their lowest ranks.

    The same arguments give the same groups. Ranks that may use only CPUs of one level-3 cache go
    together. If the ranks cannot be told apart by these caches, NUMA nodes count. Otherwise, as
    where ranks are not pinned, the groups are consecutive ranks. Groups have equal sizes where that
    is possible with at most `most` groups, and otherwise sizes as even as possible.

    Args:
        machine: The machine; None where it is not known.
        cpus_of_ranks: The CPUs that each rank may use; None where they are not known.
        world_size: Number of ranks.
        most: Most ranks of a group.
    """
    if world_size <= most:
        return (tuple(range(world_size)),)
    if machine is not None and cpus_of_ranks is not None:
        for domains in _levels(machine):
            buckets = _by_domain(domains, cpus_of_ranks)
            if buckets is not None and len(buckets) > 1:
                found = _divided(buckets, most)
                if len(found) <= most:
                    return found
    return _divided([tuple(range(world_size))], most)


def groups_of_parts(parts: Sequence[Hashable], most: int = 8) -> Groups:
    """Return the ranks in groups of at most `most`, by their lowest ranks.

    Args:
        parts: The part of the machine in which each rank is. Ranks of two parts are in one group
            only where all ranks are, because they are few enough.
        most: Most ranks of a group.
    """
    buckets: dict[Hashable, tuple[int, ...]] = {}
    for rank, part in enumerate(parts):
        buckets[part] = (*buckets.get(part, ()), rank)
    if len(parts) <= most:
        return (tuple(range(len(parts))),)
    return _divided([*buckets.values()], most)


def _levels(machine: Machine) -> Iterator[list[set[int]]]:
    """The machine's level-3 caches, and then its NUMA nodes, as the CPUs of each."""
    caches = [cache for cache in machine.caches if cache.level == 3 and cache.shared_cpus]
    yield [set(cache.shared_cpus or ()) for cache in caches]
    yield [set(node.cpus) for node in machine.numa_nodes if node.cpus]


def _by_domain(
    domains: Sequence[set[int]], cpus_of_ranks: Sequence[Collection[int]]
) -> list[tuple[int, ...]] | None:
    """The ranks of each domain that has some; None if a rank is not within one of them."""
    found: dict[int, list[int]] = {}
    for rank, cpus in enumerate(cpus_of_ranks):
        own = [i for i, domain in enumerate(domains) if cpus and set(cpus) <= domain]
        if len(own) != 1:
            return None
        found.setdefault(own[0], []).append(rank)
    return sorted(map(tuple, found.values()))


def _divided(buckets: Sequence[tuple[int, ...]], most: int) -> Groups:
    """Each bucket in blocks of at most `most`: of one size for all if that gives few enough."""
    total, common = sum(map(len, buckets)), math.gcd(*map(len, buckets))
    for size in range(min(most, common), 1, -1):
        if common % size == 0 and total // size <= most:
            blocks = (_blocks(bucket, len(bucket) // size) for bucket in buckets)
            return tuple(sorted(block for each in blocks for block in each))
    blocks = (_blocks(bucket, -(-len(bucket) // most)) for bucket in buckets)
    return tuple(sorted(block for each in blocks for block in each))


def _blocks(ranks: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """So many blocks, of sizes that differ by one at most; the first are the larger ones."""
    size, larger = divmod(len(ranks), count)
    ends = [size * i + min(i, larger) for i in range(count + 1)]
    return [ranks[begin:end] for begin, end in pairwise(ends)]
