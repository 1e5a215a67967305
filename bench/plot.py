"""Latency against size as a picture: kccl, every peer, the floor, and how far they are apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .harness import Row
from .report import best_peer, size_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    ("kccl", "host"): "#0b5fa5",
    ("kccl", "eager"): "#4aa3df",
    ("mpich", "default"): "#c8553d",
    ("mpich", "recursive_doubling"): "#e39b5a",
    ("openmpi", "default"): "#6b8f3c",
}
_OTHER_COLOURS = ("#7a5195", "#8c6d31", "#555555")
_VISIBLE_RATIO = 1.25
_LABEL_GAP = 0.045

Series = tuple[str, str, list[int], list[float]]


def plot(rows: Sequence[Row], path: Path, *, subtitle: str) -> None:
    """Write the picture of one collective's rows; the suffix of the path chooses the format.

    One size alone becomes bars, since a line needs two points.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    first = rows[0]
    kind = " ".join(str(first[key]) for key in ("dtype", "op") if first[key] is not None)
    title = (
        f"{first['collective']} {kind}".strip()
        + f", {first['world_size']} ranks: latency of one call"
    )
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", pad=24)
    axes.text(0, 1.02, subtitle, transform=axes.transAxes, fontsize=9, color="#555555")
    if len({row["bytes"] for row in rows}) > 1:
        _lines(axes, rows)
    else:
        _bars(axes, rows)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def series(rows: Sequence[Row]) -> list[Series]:
    """(label, colour, bytes, microseconds) of kccl in both modes and of every peer, without failed
    rows.
    """
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for row in rows:
        if row["time_us"] is None or (row["library"] == "kccl" and row["call"] == "direct"):
            continue
        key = (row["library"], row["mode"] if row["library"] == "kccl" else row["algorithm"])
        found.setdefault(key, []).append((row["bytes"], row["time_us"]))
    spare = iter(_OTHER_COLOURS * len(found))
    names = {("kccl", "host"): "kccl, looped in C", ("kccl", "eager"): "kccl, from Python"}
    return [
        (
            names.get(key, f"{key[0]} {key[1]}"),
            _COLOURS.get(key) or next(spare),
            [nbytes for nbytes, _ in points],
            [time_us for _, time_us in points],
        )
        for key, points in found.items()
    ]


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
    floors = sorted({(row["bytes"], row["floor_us"]) for row in rows if row["floor_us"]})
    if floors:
        axes.plot(*zip(*floors, strict=True), color="#888888", linestyle="--", linewidth=1.4)
        labels.append((floors[-1][1], "floor: one-way latency + copy", "#777777"))
    sizes = sorted({row["bytes"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(sizes[0] / 1.3, sizes[-1] * 1.3)
    step = max(1, round(len(sizes) / 9))
    axes.set_xticks(sizes[::step], [size_text(nbytes) for nbytes in sizes[::step]])
    axes.set_xlabel("message size (bytes)")
    axes.set_ylabel("microseconds per call, slowest rank")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.minorticks_off()
    _ratios(axes, rows, sizes)
    _direct_labels(axes, labels)


def _ratios(axes: Axes, rows: Sequence[Row], sizes: Sequence[int]) -> None:
    """At the ends and the middle: the best peer's time over kccl's, both called from Python."""
    is_any = False
    for nbytes in {sizes[0], sizes[len(sizes) // 2], sizes[-1]}:
        ours = [
            row
            for row in rows
            if (row["library"], row["mode"], row["call"], row["bytes"])
            == ("kccl", "eager", "prepared", nbytes)
        ]
        peer = best_peer(rows, ours[0]) if ours else None
        if peer is None or ours[0]["time_us"] is None:
            continue
        time_us = ours[0]["time_us"]
        if max(peer / time_us, time_us / peer) > _VISIBLE_RATIO:
            arrow = {"arrowstyle": "<->", "color": "#333333"}
            axes.annotate("", (nbytes, time_us), (nbytes, peer), arrowprops=arrow)
        # The text stands inside the picture: right of its arrow, left of it at the last size.
        is_last = nbytes == sizes[-1]
        axes.annotate(
            f"{peer / time_us:.1f}x",
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
        note = "2.0x: the best peer shown takes twice kccl's time, both called from Python"
        place = axes.transAxes
        axes.text(0.01, 0.98, note, transform=place, fontsize=9, color="#555555", va="top")


def _direct_labels(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Name each line at its right end, moved apart where ends lie close together."""
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
    floor = rows[0]["floor_us"]
    places = range(len(bars))
    axes.barh(
        places,
        [time_us for *_, time_us in bars],
        color=[colour for _, colour, _ in bars],
        height=0.6,
    )
    for place, (_, _, time_us) in zip(places, bars, strict=True):
        axes.annotate(
            f"{time_us:.2f} us",
            (time_us, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
        )
    if floor:
        axes.axvline(floor, color="#888888", linestyle="--", linewidth=1.4)
        axes.annotate(
            f"floor {floor:.2f} us",
            (floor, -0.5),
            xytext=(4, 0),
            textcoords="offset points",
            color="#777777",
            va="center",
        )
    axes.set_yticks(places, [label for label, *_ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("microseconds per call, slowest rank")
    axes.margins(x=0.12)
