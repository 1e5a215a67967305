"""Computes figures from a timeline: where a token's time goes, and when the memory is idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import kccl
from kccl.engine.model.timeline import ASKED, LANDED, LET_GO, PHASES, Timeline, covered

if TYPE_CHECKING:
    from rich.console import Console

WINDOW_NS = 1000.0
"""Length of a window. The memory counts as idle in a window in which no stage has landed."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """Microseconds of a token that blocks spend in one phase of a kind of op.

    Attributes:
        mean: The mean over the blocks.
        slowest: The most that one block spends.
    """

    mean: float
    slowest: float


@dataclass(frozen=True)
class Summary:
    """The figures of a rank's tokens. A stage is the weights that one copy moves into the ring of a
    block in shared memory.

    Attributes:
        token_us: Microseconds of a token.
        parts: Kind of op -> phase -> its time, in the order in which they run.
        idle_share: Fraction of the windows of WINDOW_NS in which no stage landed.
        quiet_share: Fraction of the time in which no block had a stage in flight.
        ring_level: Stages of a ring that have landed and are not released yet, on average over time
            and blocks.
        ring_stages: Stages that a ring has room for.
        in_flight: Stages of a ring that were requested and have not landed yet, on average.
        bytes_per_s: Bytes of weights that landed in a second.
        clock_error_ns: See Timeline.
    """

    token_us: float
    parts: dict[str, dict[str, Part]]
    idle_share: float
    quiet_share: float
    ring_level: float
    ring_stages: int
    in_flight: float
    bytes_per_s: float
    clock_error_ns: float


def summary_of(timeline: Timeline) -> Summary:
    """Returns the figures of a rank's kept token steps."""
    begin, end = window = timeline.window
    times, nbytes, _ = timeline.flat_stages()
    of_all = (end - begin) * timeline.layout.num_blocks
    landed = landed_in_windows(timeline)
    is_inside = (times[LANDED] >= begin) & (times[LANDED] < end)
    return Summary(
        token_us=timeline.token_step_ns * 1e-3,
        parts=_parts_of(timeline),
        idle_share=float((landed == 0).mean()),
        quiet_share=1 - covered(times[ASKED], times[LANDED], window) / (end - begin),
        ring_level=_overlap(times[LANDED], times[LET_GO], window) / of_all,
        ring_stages=timeline.layout.ring_stages,
        in_flight=_overlap(times[ASKED], times[LANDED], window) / of_all,
        bytes_per_s=float(nbytes[is_inside].sum()) / (end - begin) * 1e9,
        clock_error_ns=timeline.clock_error_ns,
    )


def landed_in_windows(timeline: Timeline) -> Array:
    """Returns the bytes that landed in each whole window of WINDOW_NS."""
    begin, end = timeline.window
    times, nbytes, _ = timeline.flat_stages()
    num = max(int((end - begin) // WINDOW_NS), 1)
    edges = begin + np.arange(num + 1) * WINDOW_NS
    return np.histogram(times[LANDED], edges, weights=nbytes)[0]


def _parts_of(timeline: Timeline) -> dict[str, dict[str, Part]]:
    found: dict[str, dict[str, Array]] = {}
    for index, op in enumerate(timeline.layout.ops):
        of_kind = found.setdefault(op.kind, {})
        for phase in op.phases:
            took = timeline.ops[:, index, phase.end] - timeline.ops[:, index, phase.begin]
            # The nanoseconds that each block spends in this phase, averaged over the token steps.
            mean = np.nan_to_num(took).mean(axis=0)
            of_kind[phase.name] = of_kind.get(phase.name, 0) + mean
    return {
        kind: {
            name: Part(float(of_kind[name].mean()) * 1e-3, float(of_kind[name].max()) * 1e-3)
            for name in PHASES
            if name in of_kind
        }
        for kind, of_kind in found.items()
    }


def _overlap(begins: Array, ends: Array, window: tuple[float, float]) -> float:
    """Returns the sum of the times that the intervals have within a window."""
    return float(np.maximum(np.clip(ends, *window) - np.clip(begins, *window), 0).sum())


def print_summary(
    out: Console, timelines: Sequence[Timeline], stream_bytes_per_s: float | None
) -> None:
    """Prints where the time of each rank's tokens goes.

    Args:
        out: The console to print to.
        timelines: The timelines of the ranks.
        stream_bytes_per_s: Bytes a second that all ranks together read if they do nothing else;
            None if it is not known.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for timeline in timelines:
        found = summary_of(timeline)
        table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(f"rank {timeline.rank}, us a token")
        for name in (*PHASES, "all"):
            table.add_column(name, justify="right")
        total = dict.fromkeys(PHASES, 0.0)
        for kind, parts in found.parts.items():
            for name, part in parts.items():
                total[name] += part.mean
            cells = [
                f"{parts[name].mean:.1f} / {parts[name].slowest:.1f}" if name in parts else ""
                for name in PHASES
            ]
            table.add_row(kind, *cells, f"{sum(part.mean for part in parts.values()):.1f}")
        everything = sum(total.values())
        table.add_row("all", *(f"{total[name]:.1f}" for name in PHASES), f"{everything:.1f}")
        out.print(table)
        share = ""
        if stream_bytes_per_s is not None:
            stream = stream_bytes_per_s / len(timelines)
            share = f", {found.bytes_per_s / stream:.0%} of the stream"
        kccl.screen.say(
            out,
            f"# {found.token_us:.1f} us a token, {timeline.num_token_steps} tokens, with the time "
            f"that stamps take; {found.token_us - everything:.1f} us of it between ops\n"
            f"# weights landed at {found.bytes_per_s * 1e-9:.0f} GB/s{share}; memory idle "
            f"{found.idle_share:.1%} of the time, no stage in flight {found.quiet_share:.1%}\n"
            f"# of a ring of {found.ring_stages} stages, {found.ring_level:.1f} were full and "
            f"{found.in_flight:.1f} in flight; clocks agree within {found.clock_error_ns:.0f} ns",
        )
    kccl.screen.say(
        out,
        "# a / b: a mean over the blocks, b the block that spends most. wait: for a vector; "
        "multiply: in attention, go through the positions; meet: for the block's other warps\n"
        f"# idle: share of windows of {WINDOW_NS * 1e-3:.0f} us in which no stage of any block "
        "landed",
    )
