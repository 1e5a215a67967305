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
UNMEASURED_ERROR = 0.5
"""The assumed relative error of a prediction that no record can be compared with."""

FIXED: Mapping[str, float] = {"pipe": 0.25, "way": 1.0}
"""Constants that are not fitted. A word cannot take less than the links' latency, so "way" is 1.
"pipe" is what a message takes besides, for the credit and the counters of its pipe. It is from
the time of 8 bytes between two H200 (bench/LOG.md, 2026-11-30)."""

CONSTANTS: Mapping[str, float] = {
    "acq_rel": 0.5975,
    "credit": 0.7061,
    "exchange": 3.7347,
    "exchange acq_rel": 1.1102,
    "exchange far acq_rel": 3.3985,
    "exchange peers": 0.0605,
    "graph": 1.2637,
    "graph peers": 0.031,
    "in kernel": 0.1926,
    "join": 3.8235,
    "local": 1.4727,
    "message": 0.1508,
    "peers": 0.0908,
    "pipe": 0.25,
    "sentinel": 0.1436,
    "simple": 7.7877,
    "slice wire": 0.3172,
    "sync acq_rel": 3.4875,
    "sync relaxed": 2.1923,
    "way": 1.0,
    "wire": 0.7444,
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
        is_loaded: Whether the GPUs' other blocks read from memory as fast as they can meanwhile.
    """

    algorithm: str
    nbytes: int
    world_size: int
    mode: str = "graph"
    complete: str = "message"
    order: str = "relaxed"
    blocks: int = 1
    is_loaded: bool = False


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
        most_packets: For a message to one peer: the most of its bytes that are sent as packets,
            which doubles them. What is left follows in plain chunks. 0 for collectives.
    """

    hops: int
    messages: float = 0.0
    chunks: float = 0.0
    is_local_chunk: bool = False
    most_packets: int = 0


MOST_PACKETS = 32 * (8192 - 16)
"""The most bytes of a message that are sent as packets: the slots of all pipes of channel 0, each
without the packets of its head."""

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
    "reduce_pairwise_ll16": _Shape(1, messages=2),
    "reduce_two_shot_push_simple": _Shape(2, chunks=2),
    "gather_direct_ll16": _Shape(1, chunks=2, is_local_chunk=True),
    "gather_push_simple": _Shape(1, chunks=1, is_local_chunk=True),
    "scatter_direct_ll16": _Shape(1, chunks=2, is_local_chunk=True),
    "scatter_push_simple": _Shape(1, chunks=1, is_local_chunk=True),
    "scan_direct_ll16": _Shape(1, messages=2),
    "scan_push_simple": _Shape(1, messages=1),
    "send_recv": _Shape(1, messages=1, most_packets=MOST_PACKETS),
    "barrier_direct": _Shape(1),
    "grid_exchange": _Shape(1, messages=2),
    "grid_sync": _Shape(0),
}
ALGORITHMS = tuple(_SHAPES)
# The kernels in which all blocks of the grid wait for each other.
_GRIDS = ("grid_exchange", "grid_sync")

RECORDED: Mapping[tuple[str, str, str, str], tuple[int, int, int, int]] = {
    ("all_gather_direct_ll16", "graph", "message", "relaxed"): (2, 4, 8192, 65536),
    ("all_gather_direct_ll16", "in_kernel", "slice", "relaxed"): (2, 4, 16, 65536),
    ("all_reduce_one_shot_ll16", "graph", "message", "relaxed"): (1, 4, 1024, 524288),
    ("all_reduce_one_shot_ll16", "in_kernel", "message", "relaxed"): (2, 4, 8, 65536),
    ("all_reduce_one_shot_ll16", "in_kernel", "slice", "relaxed"): (2, 4, 8, 65536),
    ("all_reduce_one_shot_sentinel", "graph", "message", "relaxed"): (2, 4, 65536, 1048576),
    ("all_reduce_two_shot_push_simple", "graph", "message", "relaxed"): (2, 4, 16777216, 268435456),
    ("all_reduce_two_shot_sentinel", "graph", "message", "relaxed"): (4, 4, 262144, 1048576),
    ("all_to_all_direct_ll16", "graph", "message", "relaxed"): (2, 4, 8, 1048576),
    ("all_to_all_direct_ll16", "in_kernel", "slice", "relaxed"): (4, 4, 16, 65536),
    ("barrier_direct", "graph", "message", "relaxed"): (1, 4, 0, 0),
    ("barrier_direct", "in_kernel", "message", "acq_rel"): (2, 4, 0, 0),
    ("barrier_direct", "in_kernel", "message", "relaxed"): (2, 4, 0, 0),
    ("broadcast_direct_ll16", "graph", "message", "relaxed"): (1, 4, 1024, 65536),
    ("broadcast_direct_ll16", "in_kernel", "slice", "relaxed"): (2, 4, 16, 65536),
    ("gather_direct_ll16", "graph", "message", "relaxed"): (2, 4, 8, 65536),
    ("gather_push_simple", "graph", "message", "relaxed"): (2, 2, 16777216, 67108864),
    ("grid_exchange", "in_kernel", "message", "acq_rel"): (1, 4, 2048, 8192),
    ("grid_exchange", "in_kernel", "message", "relaxed"): (1, 4, 8, 65536),
    ("grid_sync", "in_kernel", "message", "acq_rel"): (1, 1, 0, 0),
    ("grid_sync", "in_kernel", "message", "relaxed"): (1, 1, 0, 0),
    ("reduce_direct_ll16", "graph", "message", "relaxed"): (2, 4, 8, 65536),
    ("reduce_scatter_direct_ll16", "graph", "message", "relaxed"): (2, 4, 8192, 65536),
    ("reduce_scatter_direct_ll16", "in_kernel", "slice", "relaxed"): (2, 4, 8, 65536),
    ("reduce_two_shot_push_simple", "graph", "message", "relaxed"): (2, 2, 16777216, 67108864),
    ("scan_direct_ll16", "graph", "message", "relaxed"): (2, 4, 8, 1048576),
    ("scatter_direct_ll16", "graph", "message", "relaxed"): (2, 4, 8, 65536),
    ("scatter_push_simple", "graph", "message", "relaxed"): (2, 2, 16777216, 67108864),
    ("send_recv", "graph", "message", "relaxed"): (2, 2, 8, 67108864),
}
"""Calls that records of GPUs have: algorithm, mode, complete, order (in a graph "relaxed", because
it makes no difference there) -> the fewest and most ranks, the fewest and most bytes."""


class Figures:
    """The figures of a call's GPUs on which the terms depend.

    Attributes:
        within_us: Latency between compute units of a GPU; None if it is not known.
        loaded_within_us: The same beside a full stream of reads from memory.
        one_way_us: Latency to the farthest peer.
        loaded_poll_us: How much longer a poll takes beside such a stream; None if it is not known.
        gbps: The least bandwidth to a peer.
        is_shared: Whether one link carries the traffic to all peers, as to a switch. In a mesh each
            peer has its own link.
        is_achieved: Whether the bandwidth has been measured. If not, it is a datasheet's.
        is_measured: Whether a latency or bandwidth between GPUs has been measured on such a
            machine, and none is an estimate. For one GPU, whether `within_us` has been measured.
        is_within_measured: Whether `within_us` has been measured, on which grids depend.
        sources: Ids of the sources of the figures between GPUs; for one GPU, of `within_us`.
    """

    def __init__(self, graph: Graph, gpus: Sequence[Device]) -> None:
        """Finds the figures of calls among these GPUs, from the first GPU's view.

        Raises:
            ValueError: A latency or bandwidth is not known.
        """
        within = gpus[0].latency_us
        self.within_us = within.value if within else None
        of_within = graph.sources[within.source].kind if within else None
        self.is_within_measured = of_within == "measured"
        self.loaded_within_us: float | None = None
        # A call waits for the slowest of its GPUs. Some may not have been probed.
        probes = [graph.readings_of(gpu.id) for gpu in gpus]
        # The probe's idle latency is of another kernel than `within`, so a ratio is taken.
        slower = [
            found["loaded_unit_to_unit_us"] / found["unit_to_unit_us"]
            for found in probes
            if found.keys() >= {"unit_to_unit_us", "loaded_unit_to_unit_us"}
        ]
        if within and slower:
            self.loaded_within_us = within.value * max(slower)
        longer = [
            found["loaded_poll_us"] - found["poll_us"]
            for found in probes
            if found.keys() >= {"poll_us", "loaded_poll_us"}
        ]
        self.loaded_poll_us = max(longer, default=None)
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
        self.sources = {source for route in routes for source in (route.sources if route else ())}
        if len(gpus) == 1 and within:
            self.sources = {within.source}
            used = {graph.sources[within.source].kind}
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


def error_of(figures: Figures, call: Call) -> float:
    """Returns the relative error of a call's prediction: ERROR if such calls and such GPUs have
    been measured, else UNMEASURED_ERROR.
    """
    is_known = figures.is_measured and is_recorded(call) and not call.is_loaded
    if call.algorithm in _GRIDS:
        is_known = is_known and figures.is_within_measured
    return ERROR if is_known else UNMEASURED_ERROR


def is_recorded(call: Call) -> bool:
    """Returns whether the call lies within the ranks and bytes of such calls in records."""
    order = "relaxed" if call.mode == "graph" else call.order
    limits = RECORDED.get((call.algorithm, call.mode, call.complete, order))
    if limits is None:
        return False
    fewest, most, shortest, longest = limits
    return fewest <= call.world_size <= most and shortest <= call.nbytes <= longest


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
    is_message = shape.most_packets > 0
    # A rank sends its message to one peer, and the figures are those of the farthest.
    peers = min(call.world_size - 1, 1) if is_message else call.world_size - 1
    is_graph, is_slice = call.mode == "graph", call.complete == "slice"
    is_grid = call.algorithm in _GRIDS and call.blocks > 16
    found: dict[str, float] = {}
    if call.algorithm == "grid_sync":
        return {f"sync {call.order}": _within(figures, call)}
    far = figures.one_way_us if peers else 0.0
    sent = shape.messages * call.nbytes + shape.chunks * call.nbytes / call.world_size
    sent += min(call.nbytes, shape.most_packets)
    wire = 0.0
    if peers:
        each = peers if figures.is_shared else 1
        wire = sent * each / (figures.gbps * 1e3)
        if figures.is_achieved:
            # The constant "wire" is fitted to bandwidths of datasheets. Divides by it here, so that
            # it does not change a term with a measured bandwidth.
            wire /= CONSTANTS["wire"]
    if is_grid:
        found["exchange"] = _within(figures, call)
        if peers:
            found["way"] = _way(figures, call)
            found["exchange peers"] = peers
        if call.order == "acq_rel":
            near = far or _within(figures, call)
            found["exchange far acq_rel" if far else "exchange acq_rel"] = near
        return found
    found["graph" if is_graph else "in kernel"] = 1.0
    if is_graph:
        found["local"] = call.nbytes / (call.world_size if shape.is_local_chunk else 1) / 1e6
    if peers:
        found["way"] = _way(figures, call) * shape.hops
        found["graph peers" if is_graph else "peers"] = peers
        found["slice wire" if is_slice else "wire"] = wire
    if call.order == "acq_rel" and not is_graph:
        found["acq_rel"] = far
    if not is_graph and not is_slice and call.nbytes:
        found["message"] = 1.0
        if call.blocks > 1 and call.algorithm != "grid_exchange":
            found["join"] = _within(figures, call)
    if call.algorithm.startswith("broadcast") and peers and not is_graph:
        found["credit"] = far
    if "sentinel" in call.algorithm:
        # The call must also write the sentinel, the value that means "no data yet", into slots that
        # a later call uses.
        found["sentinel"] = 1.0
    if is_message:
        found["pipe"] = 1.0
    if call.algorithm.endswith("simple") or (is_message and call.nbytes > shape.most_packets):
        found["simple"] = far
    return found


def _within(figures: Figures, call: Call) -> float:
    """Returns the microseconds of a word between two compute units of a GPU."""
    if figures.within_us is None:
        raise ValueError("the latency between a GPU's compute units is not known")
    if not call.is_loaded:
        return figures.within_us
    if figures.loaded_within_us is None:
        raise ValueError("the latency between compute units beside a full stream is not known")
    return figures.loaded_within_us


def _way(figures: Figures, call: Call) -> float:
    """Returns the microseconds of a word to the farthest GPU, which polls its own memory. Beside a
    full stream the poll takes longer. What `one_way_us` stands for otherwise are no polls.
    """
    if not call.is_loaded:
        return figures.one_way_us
    if figures.loaded_poll_us is None:
        raise ValueError("the latency of a poll beside a full stream is not known")
    return figures.one_way_us + figures.loaded_poll_us
