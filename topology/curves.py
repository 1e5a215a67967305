"""Draws predictions: calls over many GPUs, and the speed of decoding (needs matplotlib)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from .decode import Projection
from .heatmap import check_plot
from .scaling import COUNTS, Chain


def plot_scaling(
    found: Mapping[str, Mapping[int, Chain]], title: str, path: str | os.PathLike[str]
) -> None:
    """Draw one line for each fabric, with a band for the error.

    Args:
        found: The result of study().
        title: What is predicted, for the picture's title.
        path: File to write; its suffix names the format (.png, .svg, .pdf).

    Raises:
        ImportError, ValueError, OSError: As check_plot().
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, chains), marker in zip(found.items(), "osD^v*", strict=False):
        counts = list(chains)
        (line,) = axes.plot(counts, [chains[n].us for n in counts], marker=marker, label=name)
        low, high = ([getattr(chains[n], end) for n in counts] for end in ("low_us", "high_us"))
        axes.fill_between(counts, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    # 72 has no label, because it would overlap that of 64.
    ticks = [count for count in COUNTS if count != 72]
    axes.set_xticks(ticks, [str(count) for count in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("GPUs")
    axes.set_ylabel("microseconds")
    axes.set_title(f"{title}: a prediction, not measured; the bands are its error")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left")
    figure.savefig(path, dpi=120)


def plot_decode(
    found: Mapping[str, Projection],
    published: Sequence[tuple[str, float]],
    title: str,
    path: str | os.PathLike[str],
) -> None:
    """Draw a point for each machine, with its error and its bound, and for each published speed.

    Args:
        found: Name of a machine -> its projection.
        published: (where, tokens a second) of what others have published.
        title: What is predicted, for the picture's title.
        path: File to write; its suffix names the format (.png, .svg, .pdf).

    Raises:
        ImportError, ValueError, OSError: As check_plot().
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    names = [f"{name}, {each.ranks} GPUs" for name, each in found.items()]
    names += [f"published: {where}" for where, _ in published]
    speeds = [1e6 / each.us for each in found.values()]
    figure = Figure(figsize=(8, 1.6 + 0.35 * len(names)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = range(len(found))
    ends = [
        [1e6 / us for us in ((each.us, each.us) if each.is_bound else reversed(each.range_us))]
        for each in found.values()
    ]
    errors = [
        [speed - low for speed, (low, _) in zip(speeds, ends, strict=True)],
        [high - speed for speed, (_, high) in zip(speeds, ends, strict=True)],
    ]
    # Points, because a bar on a logarithmic axis has no meaningful length.
    label = "predicted, with its error" if any(map(any, errors)) else "predicted: at most"
    axes.errorbar(speeds, rows, xerr=errors, fmt="o", capsize=3, label=label)
    bounds = [1e6 / each.bound_us for each in found.values()]
    axes.plot(bounds, rows, "k|", markersize=12, label="bound by the memory's bandwidth")
    if published:
        others = range(len(found), len(names))
        speeds = [speed for _, speed in published]
        axes.plot(speeds, others, "D", label="published by others, not predicted")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens a second")
    figure.suptitle(f"{title}: predicted, and published", fontsize="medium")
    axes.grid(alpha=0.3, axis="x", which="both")
    figure.legend(fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=120)
