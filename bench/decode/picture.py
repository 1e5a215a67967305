"""Draws a few layers of one token: what the blocks do, their rings, and the memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kccl.engine.model.timeline import (
    ARRIVED,
    ASKED,
    BEGAN,
    FINISHED,
    LANDED,
    LET_GO,
    Timeline,
    level,
)

from .timeline import WINDOW_NS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Array = NDArray[Any]
_LAYERS = 3
_COLUMNS = 2400
# The colours of phases. "attend" is attention's part of the phase "multiply".
_COLOURS = {
    "wait": "#e4e4e4",
    "multiply": "#0b5fa5",
    "attend": "#7a5195",
    "meet": "#d4a017",
    "finish": "#6b8f3c",
}
_KINDS = tuple(_COLOURS)
_OF_RANKS = ("#0b5fa5", "#c8553d", "#6b8f3c", "#7a5195", "#d4a017", "#12a594", "#8c6d31", "#555555")


def draw(
    path: Path, timelines: Sequence[Timeline], title: str, stream_bytes_per_s: float | None
) -> None:
    """Draws layers in the middle of the first kept token.

    Args:
        path: The picture; its suffix chooses the format.
        timelines: The timelines of all ranks.
        title: The title of the picture.
        stream_bytes_per_s: Bytes a second that all ranks together read if they do nothing else;
            None if it is not known.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranks = len(timelines)
    figure = Figure(figsize=(12, 3.2 * ranks + 4), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [*([3.2] * ranks), 1.5, 1.7]
    panels = figure.subplots(ranks + 2, 1, sharex=True, height_ratios=heights)
    begin, end = _shown(timelines)
    for timeline, axes in zip(timelines, panels, strict=False):
        _draw_blocks(axes, timeline, begin, end)
    panels[0].set_title(title, loc="left", fontsize=12, fontweight="bold", pad=26)
    _draw_rings(panels[-2], timelines, begin, end)
    _draw_memory(panels[-1], timelines, begin, end)
    if stream_bytes_per_s is not None:
        _draw_stream(panels[-1], stream_bytes_per_s / ranks * 1e-9)
    panels[-1].set_xlabel("microseconds")
    panels[-1].set_xlim(0, (end - begin) * 1e-3)
    patches = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    figure.legend(handles=patches, loc="outside upper right", fontsize=8, ncols=len(patches))
    for axes in panels:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130)


def _shown(timelines: Sequence[Timeline]) -> tuple[float, float]:
    """Returns the begin and the end of the drawn layers, in nanoseconds."""
    ops = timelines[0].layout.ops
    num_layers = max(op.layer for op in ops) + 1
    first = max((num_layers - _LAYERS) // 2, 0)
    mine = [i for i, op in enumerate(ops) if first <= op.layer < first + _LAYERS]
    times = np.concatenate([each.ops[0, mine].ravel() for each in timelines])
    return float(np.nanmin(times)), float(np.nanmax(times))


def _draw_blocks(axes: Axes, timeline: Timeline, begin: float, end: float) -> None:
    from matplotlib.colors import ListedColormap
    from matplotlib.ticker import MaxNLocator

    order = timeline.layout.by_group()
    num_blocks = len(order)
    cells = np.full((num_blocks, _COLUMNS), np.nan)
    scale = _COLUMNS / (end - begin)
    for op, times in zip(timeline.layout.ops, timeline.ops[0], strict=True):
        for phase in op.phases:
            is_attention = op.kind == "attend" and phase.name == "multiply"
            kind = _KINDS.index("attend" if is_attention else phase.name)
            for row, block in enumerate(order):
                from_to = (times[[phase.begin, phase.end], block] - begin) * scale
                if np.isnan(from_to).any() or from_to[1] <= 0 or from_to[0] >= _COLUMNS:
                    continue
                first, last = np.clip(from_to.round().astype(int), 0, _COLUMNS)
                cells[row, first:last] = kind
    axes.imshow(
        cells,
        cmap=ListedColormap(list(_COLOURS.values())),
        vmin=-0.5,
        vmax=len(_KINDS) - 0.5,
        aspect="auto",
        interpolation="nearest",
        extent=(0, (end - begin) * 1e-3, num_blocks - 0.5, -0.5),
    )
    axes.set_ylabel(f"rank {timeline.rank}: blocks,\nby residual")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    names = axes.secondary_xaxis("top")
    ticks = _op_ticks(timeline, begin, end)
    names.set_xticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=7)
    names.tick_params(length=2)


def _op_ticks(timeline: Timeline, begin: float, end: float) -> list[tuple[float, str]]:
    """Returns a tick for each op: the microseconds of its middle, and its name."""
    found = []
    for op, times in zip(timeline.layout.ops, timeline.ops[0], strict=True):
        # Skips an op that no block has begun. Its tick is in the middle between the arrival of its
        # vector and its end. In attention, blocks without a work item have stamped only the end.
        if np.isnan(times[BEGAN]).all():
            continue
        middle = (np.nanmean(times[ARRIVED]) + np.nanmean(times[FINISHED])) / 2
        if begin <= middle <= end:
            found.append((float(middle - begin) * 1e-3, f"{op.kind}\n{op.layer}"))
    return found


def _draw_rings(axes: Axes, timelines: Sequence[Timeline], begin: float, end: float) -> None:
    at = np.linspace(begin, end, _COLUMNS // 4)
    for timeline in timelines:
        name = f", rank {timeline.rank}" if len(timelines) > 1 else ""
        times, _, blocks = timeline.flat_stages()
        of_blocks = [times[:, blocks == block] for block in range(timeline.layout.num_blocks)]
        full = np.array([level(mine[LANDED], mine[LET_GO], at) for mine in of_blocks])
        flying = np.array([level(mine[ASKED], mine[LANDED], at) for mine in of_blocks])
        us = (at - begin) * 1e-3
        colour = _OF_RANKS[timeline.rank]
        axes.plot(us, full.mean(axis=0), color=colour, linewidth=1.4, label=f"full{name}")
        low, high = np.percentile(full, [10, 90], axis=0)
        axes.fill_between(us, low, high, color=colour, alpha=0.2, linewidth=0)
        mean = flying.mean(axis=0)
        axes.plot(us, mean, "--", color=colour, linewidth=1, label=f"in flight{name}")
    # Leaves room for the legend above.
    axes.set_ylim(0, 1.4 * timelines[0].layout.ring_stages)
    axes.set_ylabel("stages of a ring,\nmean, 10-90 %")
    axes.legend(loc="upper right", fontsize=8, ncols=4)


def _draw_memory(axes: Axes, timelines: Sequence[Timeline], begin: float, end: float) -> None:
    edges = np.arange(begin, end + WINDOW_NS, WINDOW_NS)
    for timeline in timelines:
        times, nbytes, _ = timeline.flat_stages()
        landed = np.histogram(times[LANDED], edges, weights=nbytes)[0]
        us = (edges - begin) * 1e-3
        label, colour = f"weights that land, rank {timeline.rank}", _OF_RANKS[timeline.rank]
        axes.stairs(landed / WINDOW_NS, us, label=label, linewidth=1.3, color=colour)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("GB/s of a rank,\nwindows of 1 us")
    axes.legend(loc="lower right", fontsize=8, ncols=4)


def _draw_stream(axes: Axes, gbps: float) -> None:
    axes.axhline(gbps, color="#888888", linestyle="--", linewidth=1.2)
    axes.annotate(
        "the stream alone",
        (0, gbps),
        xytext=(4, 3),
        textcoords="offset points",
        fontsize=8,
        color="#555555",
    )
