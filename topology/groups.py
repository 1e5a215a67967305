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
    """Returns the ranks in groups of at most `most`, sorted by their lowest ranks.

    Equal arguments give equal groups on every rank. Ranks that may use only the CPUs of one level-3
    cache are grouped together. If these caches do not distinguish the ranks, NUMA nodes do. If
    neither does, as for ranks that are not pinned, the groups are consecutive ranks. Groups have
    equal sizes if at most `most` groups suffice for that, and otherwise sizes as even as possible.

    Args:
        machine: The machine; None if it is not known.
        cpus_of_ranks: The CPUs that each rank may use; None if they are not known.
        world_size: Number of ranks.
        most: The most ranks in a group.
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
    """Returns the ranks in groups of at most `most`, sorted by their lowest ranks.

    If there are at most `most` ranks, all are in one group. Otherwise no group has ranks of two
    parts.

    Args:
        parts: The part of the machine in which each rank is.
        most: The most ranks in a group.
    """
    buckets: dict[Hashable, tuple[int, ...]] = {}
    for rank, part in enumerate(parts):
        buckets[part] = (*buckets.get(part, ()), rank)
    if len(parts) <= most:
        return (tuple(range(len(parts))),)
    return _divided([*buckets.values()], most)


def _levels(machine: Machine) -> Iterator[list[set[int]]]:
    """Yields the CPUs of each level-3 cache, and then those of each NUMA node."""
    caches = [cache for cache in machine.caches if cache.level == 3 and cache.shared_cpus]
    yield [set(cache.shared_cpus or ()) for cache in caches]
    yield [set(node.cpus) for node in machine.numa_nodes if node.cpus]


def _by_domain(
    domains: Sequence[set[int]], cpus_of_ranks: Sequence[Collection[int]]
) -> list[tuple[int, ...]] | None:
    """Returns the ranks within each domain that has ranks. Returns None if a rank may use CPUs of
    no domain or of several.
    """
    found: dict[int, list[int]] = {}
    for rank, cpus in enumerate(cpus_of_ranks):
        own = [i for i, domain in enumerate(domains) if cpus and set(cpus) <= domain]
        if len(own) != 1:
            return None
        found.setdefault(own[0], []).append(rank)
    return sorted(map(tuple, found.values()))


def _divided(buckets: Sequence[tuple[int, ...]], most: int) -> Groups:
    """Divides each bucket into blocks of at most `most` ranks. All blocks have one size if at most
    `most` blocks result.
    """
    total, common = sum(map(len, buckets)), math.gcd(*map(len, buckets))
    for size in range(min(most, common), 1, -1):
        if common % size == 0 and total // size <= most:
            blocks = (_blocks(bucket, len(bucket) // size) for bucket in buckets)
            return tuple(sorted(block for each in blocks for block in each))
    blocks = (_blocks(bucket, -(-len(bucket) // most)) for bucket in buckets)
    return tuple(sorted(block for each in blocks for block in each))


def _blocks(ranks: tuple[int, ...], count: int) -> list[tuple[int, ...]]:
    """Divides ranks into `count` blocks. Sizes differ by at most one, larger ones come first."""
    size, larger = divmod(len(ranks), count)
    ends = [size * i + min(i, larger) for i in range(count + 1)]
    return [ranks[begin:end] for begin, end in pairwise(ends)]
