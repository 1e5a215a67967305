"""Draws the core-to-core latencies of a machine as a heat map (needs matplotlib)."""

from __future__ import annotations

import os
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from .distances import NOT_MEASURED, distances, latencies_ns, measured_cpus
from .model import Cpu, Machine

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_NUMBERED_CPUS = 16  # with more CPUs, the squares have no numbers
_MAX_TICKS = 32
_MAX_LONG_LABELS = 8  # with more packages and NUMA nodes, long labels would overlap


def check_plot(path: str | os.PathLike[str]) -> None:
    """Checks that plot() can write a file. Callers do this before they measure for long.

    Raises:
        ImportError: matplotlib cannot be imported.
        ValueError: The file's suffix names no format.
        OSError: The file cannot be written.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    path = Path(path)
    # Without a known suffix, matplotlib would append one and so write another file.
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"its suffix is {path.suffix!r}, must be one of .{', .'.join(known)}")
    is_new = not path.exists()
    with open(path, "ab"):
        pass
    if is_new:
        path.unlink()


def plot_cpus(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Draw the core-to-core latencies as a heat map.

    CPUs are ordered by package, NUMA node and core, so that near ones are neighbours. Thick lines
    are package boundaries, thin ones NUMA boundaries.

    Args:
        machine: A machine whose latencies are measured.
        path: File to write; its suffix names the format (.png, .svg, .pdf).

    Raises:
        ValueError: No latency of the machine has been measured; or as check_plot().
        ImportError, OSError: As check_plot().
    """
    check_plot(path)
    cpus = measured_cpus(machine)
    if not cpus:
        raise ValueError(NOT_MEASURED)
    # Figure and not pyplot, which has global state and may connect to a window system.
    from matplotlib.figure import Figure

    latency_ns = latencies_ns(machine)
    values = [[latency_ns.get((a.id, b.id), float("nan")) for b in cpus] for a in cpus]
    # The scale starts at zero and ends above the maximum. So noise between equal pairs is hardly
    # visible.
    top_ns = 1.1 * max(latency_ns.values())
    side = min(max(3.0, 0.5 * len(cpus)), 11.0)  # inches
    width = side + 2.4
    figure = Figure(figsize=(width, side + 1.4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(values, cmap="YlGnBu", vmin=0, vmax=top_ns)
    axes.set_facecolor("0.92")  # the colour of squares that are not measured
    figure.colorbar(image, ax=axes, shrink=0.9).set_label("one-way latency (ns)")
    if len(cpus) <= _MAX_NUMBERED_CPUS:
        _write_numbers(axes, values, top_ns)
    _draw_boundaries(axes, cpus)

    ticks = range(0, len(cpus), -(-len(cpus) // _MAX_TICKS))
    labels = [str(cpus[i].id) for i in ticks]
    axes.set_xticks(ticks, labels, fontsize=8, rotation=90 if len(cpus) > 99 else 0)
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.tick_params(length=0)
    axes.set_xlabel("to CPU")
    axes.set_ylabel("from CPU")
    axes.spines[:].set_visible(False)
    model = f"{machine.cpu_model or 'CPU model unknown'}: core to core, {len(cpus)} CPUs"
    medians = " · ".join(f"{d.relation} {d.median_ns:.0f} ns" for d in distances(machine))
    lines = textwrap.wrap(model, int(10 * width)) + textwrap.wrap(medians, int(10 * width))
    figure.suptitle("\n".join(lines), fontsize=10, parse_math=False)
    figure.savefig(path)


def _write_numbers(axes: Axes, values: list[list[float]], top_ns: float) -> None:
    for i, row in enumerate(values):
        for j, ns in enumerate(row):
            if i == j:
                continue
            text = "?" if ns != ns else f"{ns:.0f}"  # only NaN differs from itself
            colour = "white" if ns > 0.6 * top_ns else "black"
            axes.text(
                j,
                i,
                text,
                ha="center",
                va="center",
                color=colour,
                fontsize=9 if len(row) > 8 else 12,
            )


def _draw_boundaries(axes: Axes, cpus: list[Cpu]) -> None:
    starts = [0]
    for i, (before, after) in enumerate(pairwise(cpus), start=1):
        is_package = before.package != after.package
        if is_package or before.numa_node != after.numa_node:
            for draw in (axes.axhline, axes.axvline):
                draw(i - 0.5, color="crimson", linewidth=2.4 if is_package else 1.0)
            starts.append(i)
    if len(starts) == 1:
        return
    for first, end in pairwise([*starts, len(cpus)]):
        cpu = cpus[first]
        package = "?" if cpu.package is None else cpu.package
        numa_node = "?" if cpu.numa_node is None else cpu.numa_node
        is_long = len(starts) <= _MAX_LONG_LABELS
        axes.annotate(
            f"package {package}\nNUMA {numa_node}" if is_long else f"P{package}\nN{numa_node}",
            ((first + end - 1) / 2, -0.5),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=8,
        )
