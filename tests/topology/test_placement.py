"""Placement of ranks and threads: on cores, in groups, and in which order they meet."""

from dataclasses import replace

import pytest

from kccl import topology
from kccl.plan.grouping import Grouping
from kccl.topology import Cache, Cpu

MACHINES = topology.recorded()
TWO_SOCKETS = MACHINES["intel-xeon-gold-6242-32-cores"]
NO_CPUS = replace(
    MACHINES["intel-xeon-2-cores"], cpus=(), caches=(), numa_nodes=(), core_to_core_us=None
)


def sockets(cores, packages=2, threads=1, *, alternate=False):
    """A machine of so many cores a package, a level-3 cache each. CPU ids go package by package, or
    from one package to the other; the second threads of all cores come last.
    """
    total = cores * packages
    cpus = []
    for cpu in range(total * threads):
        core = cpu % total
        package = core % packages if alternate else core // cores
        siblings = tuple(core + total * i for i in range(threads))
        cpus.append(
            Cpu(id=cpu, core_id=core, package=package, numa_node=package, smt_siblings=siblings)
        )
    caches = [
        Cache(
            level=3,
            type="unified",
            size_bytes=1 << 25,
            line_bytes=64,
            shared_cpus=tuple(cpu.id for cpu in cpus if cpu.package == package),
        )
        for package in range(packages)
    ]
    return replace(NO_CPUS, cpus=tuple(cpus), caches=tuple(caches))


def test_ranks_are_packed_where_cpu_numbers_alternate_between_sockets():
    machine = sockets(8, alternate=True)
    everything = [set(machine.online_cpus)] * 4
    assert topology.place_cores(machine, everything) == [0, 2, 4, 6]
    assert topology.place_cores(machine, everything, "flat") == [0, 1, 2, 3]


def test_more_ranks_than_a_cache_holds_are_spread_evenly():
    machine = sockets(8)
    found = topology.place_cores(machine, [set(range(16))] * 12)
    assert found == [*range(6), *range(8, 14)]
    groups = topology.place(machine, 12, [{cpu} for cpu in found]).groups
    assert groups == (tuple(range(6)), tuple(range(6, 12)))
    # A socket of which half is forbidden gets fewer.
    found = topology.place_cores(machine, [set(range(12))] * 12)
    assert found == list(range(12))


def test_ranks_that_fit_into_one_socket_are_in_one():
    # Three cores of the first socket are allowed, and all of the second.
    machine = sockets(8)
    allowed = {0, 1, 2, *range(8, 16)}
    assert topology.place_cores(machine, [allowed] * 5) == [8, 9, 10, 11, 12]


@pytest.mark.parametrize("layout", topology.LAYOUTS)
@pytest.mark.parametrize("machine", [sockets(4), sockets(4, threads=2, alternate=True), NO_CPUS])
@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 11])
def test_every_rank_has_a_cpu_that_it_may_use(machine, layout, ranks):
    allowed = [set(range(8))] * ranks
    found = topology.place_cores(machine, allowed, layout)
    assert len(found) == ranks and set(found) <= set(range(8))
    assert len(set(found)) == min(ranks, 8)
    assert found == topology.place_cores(machine, allowed, layout)
    # A launcher has put each on its core.
    bound = [{rank % 8} for rank in range(ranks)]
    assert topology.place_cores(machine, bound, layout) == [rank % 8 for rank in range(ranks)]


def test_threads_of_a_rank_are_neighbours_on_cores_of_their_own():
    machine = sockets(4, threads=2, alternate=True)
    everything = list(machine.online_cpus)
    two = [everything, everything]
    # A thread a core: one socket for each rank.
    found = [topology.place_threads(machine, two, rank, 4) for rank in (0, 1)]
    assert found == [(0, 2, 4, 6), (1, 3, 5, 7)]
    # All threads: the siblings stay together.
    found = [topology.place_threads(machine, two, rank, 8) for rank in (0, 1)]
    assert [sorted(own) for own in found] == [[0, 2, 4, 6, 8, 10, 12, 14], [*range(1, 16, 2)]]
    assert topology.place_threads(machine, two, 1, 4, "flat") == (4, 5, 6, 7)
    assert topology.place_threads(machine, two, 1, 9) == ()
    assert topology.place_threads(None, [[3, 1], [5]], 0, 2) == (1, 3)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("layout", topology.LAYOUTS)
def test_a_barrier_on_a_recorded_machine_has_no_faults(name, layout):
    machine = MACHINES[name]
    for ranks in (1, 2, 8, 9, 13, 16, 24, 32, 64):
        cpus = None
        if machine.cpus:
            if ranks > len(machine.cpus):
                continue
            chosen = topology.place_cores(machine, [set(machine.online_cpus)] * ranks, layout)
            cpus = [{cpu} for cpu in chosen]
        elif ranks > len(topology.Graph(machine).gpus):
            continue
        found = topology.place(machine, ranks, cpus, layout)
        assert topology.faults(found.flags) == []
        assert found == topology.place(machine, ranks, cpus, layout)
        for rank, peers in enumerate(found.peers):
            # Those that kccl/plan/grouping.py lets it meet.
            group, across = Grouping(found.groups).teams_of(rank)
            assert sorted(peers) == sorted({*group, *across} - {rank})
        assert found.leaders == tuple(group[0] for group in found.groups)
        assert found.explain().startswith(f"{ranks} ranks, layout {layout!r}")


def test_groups_of_gpus_are_nodes():
    found = topology.place(MACHINES["h200-2x8"], 16)
    assert found.groups == (tuple(range(8)), tuple(range(8, 16)))
    # Half of each node: still no group goes over the network.
    machine = MACHINES["h200-2x8"]
    nodes = [gpu for gpu in machine.devices if gpu.kind == "gpu"]
    others = [device for device in machine.devices if device.kind != "gpu"]
    mixed = [gpu for pair in zip(nodes[:8], nodes[8:], strict=True) for gpu in pair]
    mixed = replace(machine, devices=(*others, *mixed))
    found = topology.place(mixed, 16)
    assert found.groups == (tuple(range(0, 16, 2)), tuple(range(1, 16, 2)))
    assert topology.place(mixed, 16, layout="flat").groups[0] == tuple(range(8))


def test_the_farthest_peer_comes_first_and_ranks_begin_with_different_ones():
    cpus = [{0}, {1}, {16}, {2}]
    found = topology.place(TWO_SOCKETS, 4, cpus)
    assert [peers[0] for peers in found.peers[:2]] == [2, 2]
    assert found.peers[3][0] == 2
    assert topology.place(TWO_SOCKETS, 4, cpus, "flat").peers[3] == (0, 1, 2)
    equal = topology.place(MACHINES["h200-4"], 4)
    assert equal.peers == ((1, 2, 3), (2, 3, 0), (3, 0, 1), (0, 1, 2))


def placements():
    """(ranks, CPUs) of more ranks than a socket holds, as launchers usually bind them."""
    for ranks in range(17, 33):
        half = -(-ranks // 2)
        yield ranks, [{rank % 2 * 16 + rank // 2} for rank in range(ranks)]
        yield ranks, [{rank if rank < half else 16 + rank - half} for rank in range(ranks)]
        yield ranks, [{rank} for rank in range(ranks)]


def test_groups_by_the_topology_are_predicted_to_be_faster_and_never_slower():
    gains = []
    for ranks, cpus in placements():
        flat, near = (
            topology.predict_barrier(
                TWO_SOCKETS, topology.place(TWO_SOCKETS, ranks, cpus, layout), cpus
            )
            for layout in ("flat", "topology")
        )
        gains.append(flat / near)
    assert min(gains) > 0.99 and max(gains) > 1.7
    # 12 a socket: groups of 8 straddle the sockets, and so do the teams across them.
    cpus = [{rank if rank < 12 else rank + 4} for rank in range(24)]
    flat, near = (
        topology.predict_barrier(TWO_SOCKETS, topology.place(TWO_SOCKETS, 24, cpus, layout), cpus)
        for layout in ("flat", "topology")
    )
    assert flat >= 1.3 * near
    # The README says how often.
    assert sum(gain >= 1.3 for gain in gains) >= len(gains) // 2


def test_what_cannot_be_placed_says_why():
    with pytest.raises(ValueError, match="layout is 'near', must be one of topology, flat"):
        topology.place(TWO_SOCKETS, 4, layout="near")
    with pytest.raises(ValueError, match="5 ranks, must be 1 to 4"):
        topology.place(MACHINES["h200-4"], 5)
    assert topology.place(None, 3).seats == ("any CPU",) * 3
