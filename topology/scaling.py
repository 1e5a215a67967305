"""Predicts a call over more GPUs than one kernel can serve, as a chain of steps in groups of at
most 8 ranks.

The steps are those of kccl/plan/forms. They are all_reduce within groups and then across groups; or
reduce_scatter, all_reduce of each rank's part, and all_gather. Groups are made first within a
domain, whose GPUs reach each other without a network, and then across domains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .cost import ALGORITHMS, MOST_RANKS, Call, Figures, error_of, predict_by
from .discovery import recorded
from .graph import Graph
from .model import Machine

CHAINED = ("all_reduce", "barrier")
COUNTS = (2, 4, 8, 16, 32, 64, 72, 144, 288, 576)
"""Numbers of GPUs of the study."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """Domains of GPUs, and the network between them.

    Attributes:
        domain: Number of GPUs in a domain.
        near: Figures between GPUs of one domain.
        far: Figures between GPUs of two domains; None if there is one domain.
    """

    domain: int
    near: Figures
    far: Figures | None


@dataclass(frozen=True, slots=True)
class Step:
    """A call of a kernel in a chain.

    Attributes:
        kernel: The kernel's name.
        ranks: Number of ranks in a group.
        is_far: Whether a group has ranks of several domains.
        us: Predicted microseconds.
        error: The relative error of the prediction.
    """

    kernel: str
    ranks: int
    is_far: bool
    us: float
    error: float


@dataclass(frozen=True, slots=True)
class Chain:
    """The predicted steps of a call, one after another."""

    steps: tuple[Step, ...]

    @property
    def us(self) -> float:
        """The microseconds of all steps."""
        return sum(step.us for step in self.steps)

    @property
    def low_us(self) -> float:
        """The microseconds if all steps are as fast as their errors allow."""
        return sum(step.us * (1 - step.error) for step in self.steps)

    @property
    def high_us(self) -> float:
        """The microseconds if all steps are as slow as their errors allow."""
        return sum(step.us * (1 + step.error) for step in self.steps)

    def explain(self) -> list[str]:
        """Return a line for each step."""
        return [
            f"step {number}: {step.kernel} in groups of {step.ranks} "
            f"{'across domains' if step.is_far else 'within a domain'}: {step.us:.2f} us "
            f"({step.us * (1 - step.error):.2f} to {step.us * (1 + step.error):.2f})"
            for number, step in enumerate(self.steps, 1)
        ]


def fabric_of(machine: Machine, network: Machine | None = None) -> Fabric:
    """Returns the fabric of a machine: the domain of its first GPU, and the network.

    Args:
        machine: A machine of one or several domains.
        network: A machine of several domains. Its network is used if `machine` has one domain.

    Raises:
        ValueError: There are fewer than two GPUs, or a figure is not known.
    """
    graph = Graph(machine)
    if len(graph.gpus) < 2:
        raise ValueError(f"the machine has {len(graph.gpus)} GPUs, must have 2 or more")
    near = [gpu for gpu in graph.gpus if not _is_far(graph, gpu.id)]
    far = _far(graph)
    if far is None and network is not None:
        far = _far(Graph(network))
    return Fabric(len(near), Figures(graph, near[:MOST_RANKS]), far)


def _far(graph: Graph) -> Figures | None:
    """Returns the figures between the first GPU and one of another domain, or None."""
    other = next((gpu for gpu in graph.gpus if _is_far(graph, gpu.id)), None)
    return None if other is None else Figures(graph, (graph.gpus[0], other))


def _is_far(graph: Graph, gpu: str) -> bool:
    route = graph.route(graph.gpus[0].id, gpu)
    return route is None or "network" in route.kinds


def predict_chain(fabric: Fabric, collective: str, nbytes: int, world_size: int) -> Chain:
    """Returns the chain of steps of a call with the least predicted time.

    Args:
        fabric: The GPUs and their network.
        collective: One of CHAINED.
        nbytes: Bytes of the message; 0 for a barrier.
        world_size: Number of ranks. It must be at most the GPUs of a domain, or a multiple of them.

    Raises:
        ValueError: There is no such chain.
    """
    if collective not in CHAINED:
        raise ValueError(
            f"the collective is {collective!r}, must be one of {', '.join(CHAINED)} for more than "
            f"{MOST_RANKS} ranks"
        )
    within = min(world_size, fabric.domain)
    if world_size < 1 or world_size % within:
        raise ValueError(
            f"there are {world_size} ranks, must be at most {fabric.domain}, the GPUs of a domain, "
            "or a multiple of it"
        )
    if world_size > within and fabric.far is None:
        raise ValueError(f"there are {world_size} ranks, must be 1 to {within}: GPUs of the domain")
    chains = [
        Chain(tuple(_steps(fabric, collective, nbytes, (*near, *far), len(near))))
        for near in _divisions(within)
        for far in _divisions(world_size // within)
    ]
    if not chains:
        raise ValueError(
            f"there are {world_size} ranks, which groups of one size, at most {MOST_RANKS}, do not "
            "give"
        )
    return min(chains, key=lambda chain: chain.us)


def _divisions(ranks: int, most: int = MOST_RANKS) -> Iterator[tuple[int, ...]]:
    """Yields the factorisations of `ranks` into group sizes of at most `most`, the largest first.

    For example (8, 3, 3) for 72: groups of 8, in groups of 3, in groups of 3.
    """
    if ranks == 1:
        yield ()
    for size in range(min(most, ranks), 1, -1):
        if ranks % size == 0:
            for rest in _divisions(ranks // size, size):
                yield (size, *rest)


def _steps(
    fabric: Fabric, collective: str, nbytes: float, sizes: tuple[int, ...], near: int
) -> list[Step]:
    """Returns the steps of a call over groups of these sizes, in the faster one of two forms.

    The first `near` sizes are groups within a domain.
    """
    if not sizes:
        return []
    rest, left = sizes[1:], max(near - 1, 0)
    whole = [_step(fabric, collective, nbytes, sizes[0], near == 0)]
    whole += _steps(fabric, collective, nbytes, rest, left)
    if collective == "barrier" or not rest:
        return whole
    divided = [
        _step(fabric, "reduce_scatter", nbytes, sizes[0], near == 0),
        *_steps(fabric, collective, nbytes / sizes[0], rest, left),
        _step(fabric, "all_gather", nbytes, sizes[0], near == 0),
    ]
    return min(whole, divided, key=lambda steps: sum(step.us for step in steps))


def _step(fabric: Fabric, collective: str, nbytes: float, ranks: int, is_far: bool) -> Step:
    figures = fabric.far if is_far and fabric.far is not None else fabric.near
    calls = [
        Call(algorithm=name, nbytes=int(nbytes), world_size=ranks)
        for name in ALGORITHMS
        if name.startswith(f"{collective}_")
    ]
    us, call = min(((predict_by(figures, call), call) for call in calls), key=lambda pair: pair[0])
    return Step(call.algorithm, ranks, is_far, us, error_of(figures, call))


def study(collective: str, nbytes: int) -> dict[str, dict[int, Chain]]:
    """Predicts a call for each number of GPUs in COUNTS, on fabrics made of recorded machines.

    Returns:
        Name of the fabric -> number of GPUs -> the chain.

    Raises:
        ValueError: As predict_chain().
    """
    machines = recorded()
    network = machines["h200-2x8"]
    fabrics: Mapping[str, Fabric] = {
        "nodes of 8 H200, InfiniBand": fabric_of(network),
        "nodes of 8 MI300X, InfiniBand": fabric_of(machines["mi300x-8"], network),
        "racks of 72 GB200, InfiniBand": fabric_of(machines["gb200-nvl72"], network),
    }
    return {
        name: {
            count: predict_chain(fabric, collective, nbytes, count)
            for count in COUNTS
            if count <= fabric.domain or count % fabric.domain == 0
        }
        for name, fabric in fabrics.items()
    }
