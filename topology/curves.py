"""Draws the predicted times of a call over many GPUs (needs matplotlib)."""

from __future__ import annotations

import os
from collections.abc import Mapping

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
