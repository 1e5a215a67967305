"""Predicts the time of a call on a machine, from its links and latencies alone.

The time is a sum of terms. Each term is a constant times a quantity of the call or the machine:
latencies, bytes over links, peers. The constants are fitted to records of H200 GPUs (see fit.py).
They are used for other machines, too, with the figures of those machines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .graph import Graph
from .model import Machine
from .parts import Device

MOST_RANKS = 8
ERROR = 0.25
"""The largest relative error of 90 % of the predictions. Tests compare it with records."""

FIXED: Mapping[str, float] = {"way": 1.0}
"""Constants that are not fitted. A word cannot take less than the links' latency, so this is 1."""

CONSTANTS: Mapping[str, float] = {
    "acq_rel": 0.7053,
    "credit": 0.7625,
    "exchange": 3.6846,
    "exchange acq_rel": 1.2585,
    "exchange far acq_rel": 4.2082,
    "exchange peers": 0.0829,
    "graph": 1.2026,
    "graph peers": 0.1925,
    "in kernel": 0.21,
    "join": 3.9884,
    "local": 1.3585,
    "message": 0.1488,
    "peers": 0.0666,
    "sentinel": 0.2089,
    "simple": 5.9669,
    "slice wire": 0.3797,
    "sync acq_rel": 3.5683,
    "sync relaxed": 2.2289,
    "way": 1.0,
    "wire": 0.8138,
}
"""Name of a term -> its constant. tests/topology/test_cost.py fits them again, and compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The properties of a call of a kernel on which its time depends.

    Attributes:
        algorithm: Name of the kernel, as in "all_reduce_one_shot_ll16".
        nbytes: Bytes of the message, as nccl-tests counts them.
        world_size: Number of ranks, each on a GPU of its own, 1 to MOST_RANKS.
        mode: "graph" (one node of a GPU graph) or "in_kernel".
        complete: When the call ends: "message" (the whole result has arrived) or "slice" (each
            block has its part).
        order: The memory order: "relaxed" or "acq_rel".
        blocks: Number of blocks that make a call in a kernel.
    """

    algorithm: str
    nbytes: int
    world_size: int
    mode: str = "graph"
    complete: str = "message"
    order: str = "relaxed"
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class _Shape:
    """The traffic of an algorithm.

    Attributes:
        hops: The steps, one after another.
        messages: How many times the bytes of the whole message a rank sends to a peer. If there is
            a root, this is the rank with the most traffic. LL16 doubles bytes, because half of a
            packet is flags.
        chunks: How many times the bytes of one rank's chunk of the message a rank sends to a peer.
        is_local_chunk: What the term "local" counts. True: the bytes of one chunk of the message,
            which a rank copies from its x to its result, as in all_to_all. False: the bytes of the
            whole message, which it reads or writes in its own memory, as in all_reduce.
    """

    hops: int
    messages: float = 0.0
    chunks: float = 0.0
    is_local_chunk: bool = False


_SHAPES = {
    "all_reduce_one_shot_ll16": _Shape(1, messages=2),
    "all_reduce_one_shot_sentinel": _Shape(1, messages=1),
    "all_reduce_two_shot_sentinel": _Shape(2, chunks=2),
    "all_reduce_two_shot_push_simple": _Shape(2, chunks=2),
    "all_gather_direct_ll16": _Shape(1, chunks=2),
    "reduce_scatter_direct_ll16": _Shape(1, chunks=2),
    "all_to_all_direct_ll16": _Shape(1, chunks=2, is_local_chunk=True),
    "all_to_all_push_simple": _Shape(1, chunks=1, is_local_chunk=True),
    "broadcast_direct_ll16": _Shape(1, messages=2),
    "reduce_direct_ll16": _Shape(1, messages=2),
    "reduce_two_shot_push_simple": _Shape(2, chunks=2),
    "gather_direct_ll16": _Shape(1, chunks=2, is_local_chunk=True),
    "gather_push_simple": _Shape(1, chunks=1, is_local_chunk=True),
    "scatter_direct_ll16": _Shape(1, chunks=2, is_local_chunk=True),
    "scatter_push_simple": _Shape(1, chunks=1, is_local_chunk=True),
    "barrier_direct": _Shape(1),
    "grid_exchange": _Shape(1, messages=2),
    "grid_sync": _Shape(0),
}
ALGORITHMS = tuple(_SHAPES)
# The kernels in which all blocks of the grid wait for each other.
_GRIDS = ("grid_exchange", "grid_sync")


class Figures:
    """The figures of a call's GPUs on which the terms depend.

    Attributes:
        within_us: Latency between compute units of a GPU; None if it is not known.
        one_way_us: Latency to the farthest peer.
        gbps: The least bandwidth to a peer.
        is_shared: Whether one link carries the traffic to all peers, as to a switch. In a mesh each
            peer has its own link.
        is_achieved: Whether the bandwidth has been measured. If not, it is a datasheet's.
        is_measured: Whether a latency or bandwidth between GPUs has been measured on such a
            machine, and none is an estimate.
    """

    def __init__(self, graph: Graph, gpus: Sequence[Device]) -> None:
        """Finds the figures of calls among these GPUs, from the first GPU's view.

        Raises:
            ValueError: A latency or bandwidth is not known.
        """
        within = gpus[0].latency_us
        self.within_us = within.value if within else None
        self.one_way_us = 0.0
        self.gbps = 0.0
        self.is_shared = False
        used: set[str] = set()
        routes = [graph.route(gpus[0].id, gpu.id) for gpu in gpus[1:]]
        for gpu, route in zip(gpus[1:], routes, strict=True):
            if route is None or route.latency_us is None or route.bandwidth_gbps is None:
                raise ValueError(
                    f"the latency or bandwidth from {gpus[0].id} to {gpu.id} is not known"
                )
            self.one_way_us = max(self.one_way_us, route.latency_us)
            self.gbps = min(self.gbps or route.bandwidth_gbps, route.bandwidth_gbps)
            self.is_shared = self.is_shared or len(route.kinds) > 1
            used.update(graph.sources[source].kind for source in route.sources)
        self.is_measured = "measured" in used and "estimated" not in used
        widths = [link.bandwidth_gbps for _, link in graph.links_of(gpus[0].id)]
        kinds = {graph.sources[width.source].kind for width in widths if width}
        self.is_achieved = "specified" not in kinds


def figures_of(machine: Machine, world_size: int) -> Figures:
    """Returns the figures of a call on a machine's first GPUs.

    Raises:
        ValueError: The machine has fewer GPUs, or a figure is not known.
    """
    graph = Graph(machine)
    most = min(MOST_RANKS, len(graph.gpus))
    if not 1 <= world_size <= most:
        raise ValueError(
            f"there are {world_size} ranks, must be 1 to {most}: the GPUs of the machine, and at "
            f"most {MOST_RANKS}"
        )
    return Figures(graph, graph.gpus[:world_size])


def predict(machine: Machine, call: Call) -> float:
    """Returns the predicted microseconds of a call.

    Raises:
        ValueError: The model does not know the algorithm, or the machine lacks a figure.
    """
    return predict_by(figures_of(machine, call.world_size), call)


def predict_by(figures: Figures, call: Call) -> float:
    """Returns the predicted microseconds of a call among GPUs with these figures."""
    return sum(CONSTANTS[name] * value for name, value in terms(figures, call).items())


def ranked(machine: Machine, calls: list[Call]) -> list[tuple[float, Call]]:
    """Returns (predicted microseconds, call) for each call, the fastest first."""
    return sorted(((predict(machine, call), call) for call in calls), key=lambda pair: pair[0])


def terms(figures: Figures, call: Call) -> dict[str, float]:
    """Returns the terms of a call's time: name of a constant -> what it is multiplied with.

    Raises:
        ValueError: As predict().
    """
    shape = _SHAPES.get(call.algorithm)
    if shape is None:
        raise ValueError(
            f"the algorithm is {call.algorithm!r}, must be one of {', '.join(ALGORITHMS)}"
        )
    peers = call.world_size - 1
    is_graph, is_slice = call.mode == "graph", call.complete == "slice"
    is_grid = call.algorithm in _GRIDS and call.blocks > 16
    found: dict[str, float] = {}
    if call.algorithm == "grid_sync":
        return {f"sync {call.order}": _within(figures)}
    sent = shape.messages * call.nbytes + shape.chunks * call.nbytes / call.world_size
    wire = 0.0
    if peers:
        each = peers if figures.is_shared else 1
        wire = sent * each / (figures.gbps * 1e3)
        if figures.is_achieved:
            # The constant "wire" is fitted to bandwidths of datasheets. Divides by it here, so that
            # it does not change a term with a measured bandwidth.
            wire /= CONSTANTS["wire"]
    if is_grid:
        found["exchange"] = _within(figures)
        if peers:
            found["way"] = figures.one_way_us
            found["exchange peers"] = peers
        if call.order == "acq_rel":
            far = figures.one_way_us
            found["exchange far acq_rel" if far else "exchange acq_rel"] = far or _within(figures)
        return found
    found["graph" if is_graph else "in kernel"] = 1.0
    if is_graph:
        found["local"] = call.nbytes / (call.world_size if shape.is_local_chunk else 1) / 1e6
    if peers:
        found["way"] = figures.one_way_us * shape.hops
        found["graph peers" if is_graph else "peers"] = peers
        found["slice wire" if is_slice else "wire"] = wire
    if call.order == "acq_rel" and not is_graph:
        found["acq_rel"] = figures.one_way_us
    if not is_graph and not is_slice and call.nbytes:
        found["message"] = 1.0
        if call.blocks > 1 and call.algorithm != "grid_exchange":
            found["join"] = _within(figures)
    if call.algorithm.startswith("broadcast") and peers and not is_graph:
        found["credit"] = figures.one_way_us
    if "sentinel" in call.algorithm:
        # The call must also write the sentinel, the value that means "no data yet", into slots that
        # a later call uses.
        found["sentinel"] = 1.0
    if call.algorithm.endswith("simple"):
        found["simple"] = figures.one_way_us
    return found


def _within(figures: Figures) -> float:
    if figures.within_us is None:
        raise ValueError("the latency between a GPU's compute units is not known")
    return figures.within_us
