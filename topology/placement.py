"""Places ranks: chooses their cores, groups, leaders and flags, and the order of their peers.

The functions are pure: equal descriptions of a machine give equal placements. `place` is for the
ranks of a communicator, `place_threads` for the threads of one rank, and `place_blocks` in
blocks.py for the blocks of a GPU's kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .apart import latency_of
from .graph import Graph
from .groups import Groups, groups, groups_of_parts
from .layout import LINE_BYTES, Flag, Layout, time_us
from .model import Machine
from .pinning import assign, core_of, nearness

LAYOUTS = ("topology", "flat")
"""Place by the topology, or as if all parts of the machine were equally near."""

MOST_RANKS_OF_TEAM = 8
CPU_SHARE = 0.02
"""The delay of a CPU for each further line that it writes or reads, as a fraction of the line's
latency. It is the most that was measured when two cores of an AMD EPYC sent each other 1 to 16
lines (bench/LOG.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The placement of a communicator's ranks, which place() returns.

    Attributes:
        layout: One of LAYOUTS.
        seats: Where each rank runs: "cpu3", "node0/gpu1", or "any CPU".
        groups: The ranks of each group. There is one group if all ranks exchange in one step.
        peers: For each rank its peers in the order in which it writes to them, over all steps.
        flags: The flags of a barrier: who writes them, where they lie, and who polls them.
        reasons: Sentences that say why this placement was chosen.
    """

    layout: str
    seats: tuple[str, ...]
    groups: Groups
    peers: tuple[tuple[int, ...], ...]
    flags: Layout
    reasons: tuple[str, ...]

    @property
    def leaders(self) -> tuple[int, ...]:
        """The leader of each group, which is the group's first rank."""
        return tuple(group[0] for group in self.groups)

    def explain(self) -> str:
        """Describes the placement, with a line for each group."""
        lines = [f"{len(self.seats)} ranks, layout {self.layout!r}"]
        for group in self.groups:
            where = ", ".join(dict.fromkeys(self.seats[rank] for rank in group))
            lines.append(f"  group {_listed(group)} on {where}; rank {group[0]} leads")
        first = self.peers[0]
        if len(first) > 1:
            order = ", ".join(map(str, first))
            lines.append(f"  rank 0 had best write to its peers in the order {order}")
        return "\n".join([*lines, *(f"  {reason}" for reason in self.reasons)])


def place_cores(
    machine: Machine | None, allowed: Sequence[Collection[int]], layout: str = "topology"
) -> list[int]:
    """Returns a logical CPU for each rank, out of those that the rank may use.

    As many ranks as possible get their own core. In the layout "topology", ranks are packed evenly
    into the fewest level-3 caches (or NUMA nodes, or packages) with enough cores, and consecutive
    ranks are near each other. In the layout "flat", cores are taken in the order of their numbers.

    Args:
        machine: The machine; None if it is not known, which gives the layout "flat".
        allowed: The logical CPUs that each rank may use.
        layout: One of LAYOUTS.

    Raises:
        ValueError: There is no such layout.
    """
    sets = [set(cpus) for cpus in allowed]
    if machine is None:
        check_layout(layout)
        return assign(sets, lambda cpu: cpu)
    if check_layout(layout) == "flat":
        return assign(sets, core_of(machine))
    first, place = core_of(machine), nearness(machine)
    cores = sorted({first(cpu) for cpu in set().union(*sets)}, key=place)
    preferred = [cores] * len(sets)
    if all(each == sets[0] for each in sets):
        preferred = [
            [*domain, *(core for core in cores if core not in domain)]
            for domain, count in _packed(machine, cores, len(sets))
            for _ in range(count)
        ] or preferred
    return assign(sets, first, preferred)


def _packed(machine: Machine, cores: list[int], ranks: int) -> list[tuple[list[int], int]]:
    """Chooses the fewest neighbouring domains that together have a core for each rank.

    Returns:
        (the cores of a domain, the number of its ranks) for each; [] if there are too few cores.
    """
    domains: dict[tuple[float, ...], list[int]] = {}
    place = nearness(machine)
    for core in cores:
        domains.setdefault(place(core)[:3], []).append(core)
    parts = list(domains.items())
    for count in range(1, len(parts) + 1):
        runs = [parts[i : i + count] for i in range(len(parts) - count + 1)]
        enough = [run for run in runs if sum(len(own) for _, own in run) >= ranks]
        if enough:
            # Takes the run of domains with the fewest packages.
            best = min(enough, key=lambda run: len({part[0] for part, _ in run}))
            return _evenly([own for _, own in best], ranks)
    return []


def _evenly(domains: list[list[int]], ranks: int) -> list[tuple[list[int], int]]:
    """Returns (domain, number of its ranks), with numbers as even as the domains' cores allow."""
    counts = [0] * len(domains)
    for _ in range(ranks):
        free = [i for i, own in enumerate(domains) if counts[i] < len(own)]
        counts[min(free, key=lambda i: counts[i])] += 1
    return list(zip(domains, counts, strict=True))


def place_threads(
    machine: Machine | None,
    cpus_of_ranks: Sequence[Sequence[int]],
    rank: int,
    threads: int,
    layout: str = "topology",
) -> tuple[int, ...]:
    """Returns a logical CPU for each thread of a rank.

    Ranks that may use the same CPUs divide them in rank order. In the layout "topology", a rank's
    CPUs are near each other, and no two threads share a core if there are enough cores. In the
    layout "flat", they are in the order of their numbers.

    Args:
        machine: As in place_cores().
        cpus_of_ranks: The logical CPUs that each rank may use.
        rank: The rank.
        threads: Number of threads of each rank.
        layout: One of LAYOUTS.

    Returns:
        As many CPUs as threads; none if there are fewer CPUs than threads.

    Raises:
        ValueError: There is no such layout.
    """
    mine = sorted(cpus_of_ranks[rank])
    sharing = [other for other, cpus in enumerate(cpus_of_ranks) if sorted(cpus) == mine]
    if threads * len(sharing) > len(mine):
        return ()
    if check_layout(layout) == "topology" and machine is not None:
        first, place = core_of(machine), nearness(machine)
        mine.sort(key=place)
        number: dict[int, int] = {}
        if threads * len(sharing) <= len({first(cpu) for cpu in mine}):
            for cpu in mine:
                number[cpu] = sum(1 for other in number if first(other) == first(cpu))
            mine.sort(key=lambda cpu: (number[cpu], *place(cpu)))
    begin = sharing.index(rank) * threads
    return tuple(mine[begin : begin + threads])


def place(
    machine: Machine | None,
    world_size: int,
    cpus: Sequence[Collection[int]] | None = None,
    layout: str = "topology",
) -> Placement:
    """Places the ranks of a communicator.

    Args:
        machine: The machine; None if it is not known.
        world_size: Number of ranks.
        cpus: The CPUs to which each rank is pinned. None: rank i runs on the i-th GPU if the
            machine has GPUs, and otherwise on any CPU.
        layout: One of LAYOUTS.

    Raises:
        ValueError: There is no such layout, or the machine has fewer GPUs.
    """
    check_layout(layout)
    gpus = Graph(machine).gpus if machine is not None and cpus is None else ()
    if gpus and len(gpus) < world_size:
        raise ValueError(f"there are {world_size} ranks, must be 1 to {len(gpus)}: a GPU each")
    reasons = []
    if layout == "flat":
        found = groups(None, None, world_size)
        reasons.append("groups are consecutive ranks, and peers come by their numbers")
    elif gpus:
        found = groups_of_parts(_domains(Graph(machine), world_size)) if machine else ()
        reasons.append("ranks of one group reach each other without a network")
    else:
        found = groups(machine, cpus, world_size)
        is_told = machine is not None and cpus is not None and world_size > MOST_RANKS_OF_TEAM
        same = found == groups(None, None, world_size)
        if is_told and not same:
            reasons.append("ranks of one group share a level-3 cache or a NUMA node")
        elif world_size > MOST_RANKS_OF_TEAM:
            reasons.append("groups are consecutive ranks: nothing tells the ranks apart")
    latency = latency_of(machine, world_size, cpus)
    order = _by_number if layout == "flat" else _farthest_first(latency)
    if layout != "flat" and world_size > 2:
        reasons.append(
            "the farthest peer comes first, because its word takes longest, and of equally far "
            "ones the next rank, so that ranks do not all write to the same one; the kernels of "
            "today write by number"
        )
    if gpus:
        seats = tuple(gpu.id for gpu in gpus[:world_size])
    elif cpus is not None:
        seats = tuple(_seat(own) for own in cpus)
    else:
        seats = ("any CPU",) * world_size
    flags = barrier_of(found, seats, order)
    written: list[list[int]] = [[] for _ in range(world_size)]
    for flag in flags.flags:
        if flag.pollers[0] not in written[flag.writer]:
            written[flag.writer].append(flag.pollers[0])
    return Placement(
        layout=layout,
        seats=seats,
        groups=found,
        peers=tuple(map(tuple, written)),
        flags=flags,
        reasons=tuple(reasons),
    )


Order = Callable[[int, Sequence[int]], list[int]]
"""(rank, its peers) -> the peers in the order in which the rank writes to them."""


def barrier_of(found: Groups, seats: Sequence[str], order: Order) -> Layout:
    """Returns the flags of a barrier over groups, with the steps of kccl/plan/forms/barrier.py.

    The first step is within each group, and the second across groups. If groups differ in size,
    only leaders take part in the second step, and a third one is within each group again. Each rank
    polls its own memory, in which each step and writer has its own line.
    """
    is_even = len({len(group) for group in found}) == 1
    within = [team for group in found for team in [group] if len(team) > 1]
    across = [tuple(found_at) for found_at in zip(*found, strict=True)] if is_even else []
    if not is_even:
        across = [tuple(group[0] for group in found)]
    across = [team for team in across if len(team) > 1]
    steps = [within, across] + ([within] if across and not is_even else [])
    ranks = range(sum(map(len, found)))
    seen: list[tuple[int, ...]] = [() for _ in ranks]
    flags: list[Flag] = []
    for number, teams in enumerate(step for step in steps if step):
        came: list[list[int]] = [[] for _ in ranks]
        for team in teams:
            for rank in team:
                for peer in order(rank, [other for other in team if other != rank]):
                    came[peer].append(len(flags))
                    line = number * MOST_RANKS_OF_TEAM + team.index(rank)
                    flags.append(
                        Flag(
                            writer=rank,
                            at=f"rank {peer}",
                            offset=line * LINE_BYTES,
                            pollers=(peer,),
                            after=seen[rank],
                        )
                    )
        # A rank's later flags depend on all flags that it has polled up to this step.
        seen = [(*old, *new) for old, new in zip(seen, came, strict=True)]
    return Layout(
        name="groups" if len(found) > 1 else "flat",
        seats=tuple(seats),
        homes=tuple(f"rank {rank}" for rank in ranks),
        leaders=tuple((seats[group[0]], group[0]) for group in found),
        flags=tuple(flags),
        is_near=True,
    )


def predict_barrier(
    machine: Machine, placement: Placement, cpus: Sequence[Collection[int]] | None = None
) -> float:
    """Predicts the microseconds of a barrier, without the overhead of its calls.

    The prediction also holds for an all_reduce of 8 bytes, which has the same steps.

    Args:
        machine: The machine.
        placement: The result of place().
        cpus: The argument of that call of place().
    """
    latency = latency_of(machine, len(placement.seats), cpus)

    def way(flag: Flag, poller: int) -> float:
        return latency(flag.writer, poller)

    return time_us(placement.flags, way, way, CPU_SHARE)


def _by_number(rank: int, peers: Sequence[int]) -> list[int]:
    return sorted(peers)


def _farthest_first(latency: Callable[[int, int], float]) -> Order:
    def order(rank: int, peers: Sequence[int]) -> list[int]:
        most = max(rank, *peers) + 1 if peers else 1
        return sorted(peers, key=lambda peer: (-latency(rank, peer), (peer - rank) % most))

    return order


def _domains(graph: Graph, world_size: int) -> list[str]:
    """Returns for each rank the first GPU that the rank's GPU reaches without a network."""
    found: list[str] = []
    for gpu in graph.gpus[:world_size]:
        for first in dict.fromkeys(found):
            route = graph.route(first, gpu.id)
            if route is not None and "network" not in route.kinds:
                found.append(first)
                break
        else:
            found.append(gpu.id)
    return found


def _seat(cpus: Collection[int]) -> str:
    own = sorted(cpus)
    if not own:
        return "any CPU"
    return f"cpu{own[0]}" if len(own) == 1 else f"CPUs {', '.join(map(str, own))}"


def check_layout(layout: str) -> str:
    """Checks that a layout exists, and returns it.

    Raises:
        ValueError: There is no such layout.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}, must be one of {', '.join(LAYOUTS)}")
    return layout


def _listed(ranks: Sequence[int]) -> str:
    is_run = len(ranks) > 2 and all(b == a + 1 for a, b in pairwise(ranks))
    return f"{ranks[0]}-{ranks[-1]}" if is_run else ", ".join(map(str, ranks))
