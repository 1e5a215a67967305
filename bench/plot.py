"""Draws latency against size: kccl, every peer, the floor, and ratios of peers to kccl.

    python -m kccl.bench.plot document.json -o picture.png

draws a recorded run. For a run on GPUs a second panel compares the skewed runs with the others.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .harness.document import load, subtitle
from .harness.measure import Row
from .harness.report import best_peer, headline, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    ("kccl", "host"): "#0b5fa5",
    ("kccl", "eager"): "#4aa3df",
    ("kccl", "graph"): "#0b5fa5",
    ("kccl", "in a kernel, slice"): "#0b5fa5",
    ("kccl", "in a kernel, message"): "#4aa3df",
    ("kccl", "in a kernel, message, by exchange"): "#12a594",
    ("kccl", "in a kernel, relaxed"): "#0b5fa5",
    ("kccl", "in a kernel, acq_rel"): "#4aa3df",
    ("nccl", "default"): "#6b8f3c",
    ("nccl", "symmetric_window"): "#a3b86c",
    ("torch_symm_mem", "one_shot"): "#c8553d",
    ("torch_symm_mem", "two_shot"): "#e39b5a",
    ("flashinfer", "one_shot"): "#d4a017",
    ("flashinfer", "two_shot"): "#8c6d31",
    ("nvshmem", "on_stream"): "#7a5195",
    ("mpich", "default"): "#c8553d",
    ("mpich", "recursive_doubling"): "#e39b5a",
    ("openmpi", "default"): "#6b8f3c",
}
_OTHER_COLOURS = ("#7a5195", "#8c6d31", "#555555")
_VISIBLE_RATIO = 1.25
_LABEL_GAP = 0.045

Series = tuple[str, str, list[int], list[float]]


def plot(rows: Sequence[Row], path: Path, *, subtitle: str) -> None:
    """Writes the picture of one collective's rows. The suffix of the path chooses the format.

    A single size is drawn as bars, because a line needs two points.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    skewed = [row for row in rows if row.get("skewed_us") is not None]
    has_sizes = len({row["bytes"] for row in rows}) > 1
    panels = 2 if skewed and has_sizes else 1
    figure = Figure(figsize=(9.5 * panels, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes, *more = figure.subplots(1, panels, squeeze=False)[0]
    first = rows[0]
    kind = " ".join(str(first[key]) for key in ("dtype", "op") if first[key] is not None)
    ranks = max(row["world_size"] for row in rows)
    size = f", {size_text(first['bytes'])} bytes" if first["bytes"] and not has_sizes else ""
    title = f"{first['collective']} {kind}".strip()
    title += f"{size}, {ranks} rank{'s' if ranks > 1 else ''}: latency of one call"
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=24)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=9, color="#555555")
    if has_sizes:
        _lines(axes, rows)
    else:
        _bars(axes, rows)
    for panel in more:
        panel.set_title("skewed runs beside the others", loc="left", fontsize=13, pad=24)
        note = "dotted: time since the last rank arrived; one random rank is 0-5 us late per step"
        panel.text(0, 1.02, note, transform=panel.transAxes, fontsize=9, color="#555555")
        _skewed_lines(panel, skewed)
    for panel in (axes, *more):
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the newest document of each file. Returns 2 when a file has none with rows."""
    parser = argparse.ArgumentParser(
        prog="python -m kccl.bench.plot",
        description=main.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("documents", type=Path, nargs="+", help="output of kccl bench ... --json")
    parser.add_argument(
        "-o", "--out", type=Path, metavar="F", help="the picture (beside its document, as .png)"
    )
    args = parser.parse_args(argv)
    if args.out is not None and len(args.documents) > 1:
        parser.error("--out is for one document")
    empty = False
    for path in args.documents:
        documents = load(path)
        if not documents or not documents[-1]["rows"]:
            print(f"{path} holds no document with rows", file=sys.stderr)
            empty = True
            continue
        picture = args.out or path.with_suffix(".png")
        plot(documents[-1]["rows"], picture, subtitle=subtitle(documents[-1]))
    return 2 if empty else 0


def series(rows: Sequence[Row]) -> list[Series]:
    """Returns the lines of a picture: (label, colour, bytes, microseconds) for each mode of kccl
    and each peer. Failed rows are left out, and on GPUs all calls of peers outside of graphs.
    """
    on_gpus = _graph_mode(rows)
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        is_ours = row["library"] == "kccl"
        if row["time_us"] is None or (is_ours and row["call"] == "direct"):
            continue
        if on_gpus and not is_ours and row["mode"] != "graph":
            continue
        key = (row["library"], _kind(row) if is_ours else row["algorithm"])
        found.setdefault(key, []).append((row["bytes"], row["time_us"]))
    spare = iter(_OTHER_COLOURS * len(found))
    in_kernels = {key: f"kccl, {key[1]}" for key in found if key[1].startswith("in a kernel")}
    names = in_kernels | {
        ("kccl", "host"): "kccl, looped in C",
        ("kccl", "eager"): "kccl, from Python",
        ("kccl", "graph"): "kccl, in a graph",
    }
    return [
        (
            names.get(key, f"{key[0]} {key[1]}"),
            _COLOURS.get(key) or next(spare),
            [nbytes for nbytes, _ in points],
            [time_us for _, time_us in points],
        )
        for key, points in found.items()
    ]


def _kind(row: Row) -> str:
    """Returns the name of kccl's line to which a row belongs."""
    if row["mode"] != "in_kernel":
        return str(row["mode"])
    if row["collective"] == "exchange":
        where = "one GPU" if row["world_size"] == 1 else f"{row['world_size']} GPUs"
        return f"in a kernel, {row['order']}, {where}"
    kind = f"in a kernel, {row['complete'] if row['dtype'] else row['order']}"
    # grid_exchange is an all_reduce by publish and collect_reduced.
    return f"{kind}, by exchange" if row["algorithm"] == "grid_exchange" else kind


def _lines(axes: Axes, rows: Sequence[Row]) -> None:
    labels = []
    for label, colour, sizes, times in series(rows):
        is_ours = label.startswith("kccl")
        axes.plot(
            sizes,
            times,
            color=colour,
            linewidth=2.4 if is_ours else 1.5,
            marker="o",
            markersize=3.5,
        )
        labels.append((times[-1], label, colour))
    # Draws a floor for each world size: within one GPU the floor is lower than among all GPUs.
    for ranks in sorted({row["world_size"] for row in rows}):
        floors = sorted(
            {
                (row["bytes"], row["floor_us"])
                for row in rows
                if row["floor_us"] and row["world_size"] == ranks
            }
        )
        if not floors:
            continue
        axes.plot(*zip(*floors, strict=True), color="#888888", linestyle="--", linewidth=1.4)
        is_bare = rows[0]["mode"] in ("graph", "in_kernel")
        floor = "floor: one-way latency" if is_bare else "floor: one-way latency + copy"
        labels.append((floors[-1][1], floor, "#777777"))
    sizes = _size_axis(axes, rows)
    _ratios(axes, rows, sizes)
    _direct_labels(axes, labels)


def _skewed_lines(axes: Axes, rows: Sequence[Row]) -> None:
    """Draws each library's calls in graphs as in the first panel, and its skewed run dotted."""
    labels = []
    pairs = zip(series(rows), _skewed_series(rows), strict=True)
    for (label, colour, sizes, times), (_, _, _, skewed) in pairs:
        axes.plot(sizes, times, color=colour, linewidth=1.5, marker="o", markersize=3.5)
        axes.plot(sizes, skewed, color=colour, linewidth=1.5, linestyle=":", marker="o", ms=3.5)
        labels.append((times[-1], label, colour))
    _size_axis(axes, rows)
    _direct_labels(axes, labels)


def _skewed_series(rows: Sequence[Row]) -> list[Series]:
    """Returns what series() returns, with the times of the skewed runs. Rows without one are left
    out.
    """
    had = [row for row in rows if row.get("skewed_us") is not None]
    return series([row | {"time_us": row["skewed_us"]} for row in had])


def _graph_mode(rows: Sequence[Row]) -> bool:
    return any(row["mode"] == "graph" for row in rows)


def _size_axis(axes: Axes, rows: Sequence[Row]) -> list[int]:
    """Make both axes logarithmic. Returns the sizes in bytes."""
    from matplotlib.ticker import LogLocator

    sizes = sorted({row["bytes"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    step = math.ceil(len(sizes) / 12)
    axes.set_xticks(sizes[::step], [size_text(nbytes) for nbytes in sizes[::step]])
    axes.set_xlabel("message size (bytes)")
    axes.set_ylabel("microseconds per call, slowest rank")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.minorticks_off()
    return sizes


def _ratios(axes: Axes, rows: Sequence[Row], sizes: Sequence[int]) -> None:
    """Writes the ratio of the best peer's time to kccl's, both in one mode, at the smallest, the
    middle and the largest size.
    """
    is_any = False
    how = "in graphs" if _graph_mode(rows) else "called from Python"
    for nbytes in {sizes[0], sizes[len(sizes) // 2], sizes[-1]}:
        ours = [row for row in headline(rows) if row["bytes"] == nbytes]
        peer = best_peer(rows, ours[0]) if ours else None
        if peer is None or ours[0]["time_us"] is None:
            continue
        time_us = ours[0]["time_us"]
        if max(peer / time_us, time_us / peer) > _VISIBLE_RATIO:
            arrow = {"arrowstyle": "<->", "color": "#333333"}
            axes.annotate("", (nbytes, time_us), (nbytes, peer), arrowprops=arrow)
        # The text is right of its arrow, but left of it at the last size, to stay in the picture.
        is_last = nbytes == sizes[-1]
        axes.annotate(
            f"{peer / time_us:.{1 if peer >= time_us else 2}f}x",
            (nbytes, float(np.sqrt(time_us * peer))),
            xytext=(-6 if is_last else 6, 0),
            textcoords="offset points",
            fontsize=10,
            fontweight="bold",
            ha="right" if is_last else "left",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
        is_any = True
    if is_any:
        note = f"2.0x: the best peer shown takes twice kccl's time, both {how}"
        place = axes.transAxes
        axes.text(0.01, 0.98, note, transform=place, fontsize=9, color="#555555", va="top")


def _direct_labels(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Writes each line's name at its right end. Moves names apart if lines end close together."""
    low, high = np.log10(axes.get_ylim())
    ends = sorted(labels)
    places = [float((np.log10(value) - low) / (high - low)) for value, _, _ in ends]
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + _LABEL_GAP)
    ceiling = 1.0
    for i in reversed(range(len(places))):
        places[i] = min(places[i], ceiling)
        ceiling = places[i] - _LABEL_GAP
    for place, (_, label, colour) in zip(places, ends, strict=True):
        axes.text(
            1.01, place, label, color=colour, transform=axes.transAxes, fontsize=9.5, va="center"
        )


def _bars(axes: Axes, rows: Sequence[Row]) -> None:
    bars = [(label, colour, times[0]) for label, colour, _, times in series(rows)]
    skewed = {label: times[0] for label, _, _, times in _skewed_series(rows)}
    places = range(len(bars))
    axes.barh(
        places,
        [time_us for *_, time_us in bars],
        color=[colour for _, colour, _ in bars],
        height=0.6,
    )
    for place, (label, _, time_us) in zip(places, bars, strict=True):
        axes.annotate(
            f"{time_us:.2f} us" + (f", skewed {skewed[label]:.2f}" if label in skewed else ""),
            (time_us, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(places, [label for label, *_ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds per call, slowest rank")
    axes.margins(x=0.12, y=0.15)
    # Draws each floor: within one GPU the floor is lower than among all GPUs.
    for floor_us in sorted({row["floor_us"] for row in rows if row["floor_us"]}):
        axes.axvline(floor_us, color="#888888", linestyle="--", linewidth=1.4)
        axes.annotate(
            f"floor {floor_us:.2f} us",
            (floor_us, 0.01),
            xycoords=axes.get_xaxis_transform(),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=9,
            color="#777777",
            va="bottom",
        )


if __name__ == "__main__":
    sys.exit(main())
