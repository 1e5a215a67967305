"""topology.groups(): which ranks are close to each other."""

from dataclasses import replace

import pytest

from kccl import topology
from kccl.topology import Cache, NumaNode

RECORDED = topology.recorded()["intel-xeon-2-cores"]


def machine(caches=(), nodes=()):
    """A machine whose level-3 caches and NUMA nodes have these CPUs."""
    return replace(
        RECORDED,
        caches=tuple(
            Cache(level=3, type="unified", size_bytes=1 << 25, line_bytes=64, shared_cpus=cpus)
            for cpus in map(tuple, caches)
        ),
        numa_nodes=tuple(
            NumaNode(id=i, cpus=tuple(cpus), memory_bytes=None, distances=None)
            for i, cpus in enumerate(nodes)
        ),
    )


def sizes(groups):
    return [len(group) for group in groups]


@pytest.mark.parametrize(
    ("world_size", "wanted"),
    [
        (1, [1]),
        (8, [8]),
        (9, [3, 3, 3]),
        (11, [6, 5]),
        (12, [6, 6]),
        (16, [8, 8]),
        (22, [8, 7, 7]),
        (64, [8] * 8),
    ],
)
def test_ranks_that_are_not_pinned_are_in_consecutive_groups(world_size, wanted):
    cpus = [{0, 1}] * world_size
    for found in (
        topology.groups(None, None, world_size),
        topology.groups(RECORDED, cpus, world_size),
    ):
        assert sizes(found) == wanted
        assert [rank for group in found for rank in group] == list(range(world_size))


def test_ranks_of_one_cache_are_a_group():
    found = topology.groups(
        machine(caches=[range(8), range(8, 16)]), [{8 * (rank % 2)} for rank in range(16)], 16
    )
    assert found == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))


def test_unlike_numbers_in_caches_give_groups_of_one_size():
    cpus = [{0}] * 8 + [{8}] * 4
    found = topology.groups(machine(caches=[range(8), range(8, 16)]), cpus, 12)
    assert found == (tuple(range(4)), tuple(range(4, 8)), tuple(range(8, 12)))
    found = topology.groups(machine(caches=[range(8), range(8, 16)]), [*cpus, {8}], 13)
    assert sizes(found) == [8, 5]


def test_many_small_caches_give_way_to_numa_nodes():
    small = [(cpu,) for cpu in range(16)]
    both = machine(caches=small, nodes=[range(8), range(8, 16)])
    cpus = [{(8 * rank + rank // 2) % 16} for rank in range(16)]
    found = topology.groups(both, cpus, 16)
    assert sizes(found) == [8, 8]
    assert found[0] == tuple(rank for rank in range(16) if cpus[rank] <= set(range(8)))


def test_a_rank_that_may_run_anywhere_hides_the_caches():
    cpus = [{0}] * 6 + [{8}] * 5 + [{0, 8}]
    found = topology.groups(machine(caches=[range(8), range(8, 16)]), cpus, 12)
    assert found == (tuple(range(6)), tuple(range(6, 12)))


@pytest.mark.parametrize("world_size", range(1, 65))
def test_every_rank_is_in_one_group(world_size):
    found = topology.groups(None, None, world_size)
    assert sorted(rank for group in found for rank in group) == list(range(world_size))
    assert len(found) <= 8 and max(sizes(found)) <= 8
    assert max(sizes(found)) - min(sizes(found)) <= 1
