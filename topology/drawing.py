"""Draws a machine's GPUs, their dies and links, and how far each GPU is from each (matplotlib)."""

from __future__ import annotations

import math
import os
import textwrap
from typing import TYPE_CHECKING

from . import heatmap, matrices
from .device_tables import way_name, ways
from .graph import Graph
from .model import Machine
from .parts import Device

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "nvlink": "#3f8f29",
    "xgmi": "#c8372d",
    "pcie": "#777777",
    "c2c": "#8a5fb5",
    "network": "#1f6fb4",
    "die_to_die": "#c8a22d",
}
_FILLS = {"gpu": "#eef3e8", "io_die": "#f7e7c6", "die": "#f3b9a8", "l2_partition": "#cfe3f5"}
_MOST_LINES = 16  # with more GPUs, the links of a node's GPUs are drawn as one line
_MOST_NAMED = 16  # with more GPUs, the squares of the matrix have no numbers
_MOST_DETAILED = 16
_Box = tuple[float, float, float, float]  # left, bottom, width, height


def plot(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Draw a machine: its GPUs and their links, or without GPUs the latencies between its CPUs.

    Args:
        machine: A machine with GPUs, or one whose core-to-core latencies are measured.
        path: File to write; its suffix names the format (.png, .svg, .pdf).

    Raises:
        ValueError: The machine has neither; or as check_plot().
        ImportError, OSError: As check_plot().
    """
    graph = Graph(machine)
    if not graph.gpus:
        heatmap.plot_cpus(machine, path)
        return
    heatmap.check_plot(path)
    from matplotlib.figure import Figure

    num_gpus = len(graph.gpus)
    height = 7 if num_gpus > 4 else 5.5
    within = matrices.within_gpus(machine)
    rows = len(within)
    figure = Figure(figsize=(14, height + 5 * rows), dpi=120, layout="constrained")
    upper, *lower = figure.subfigures(
        1 + rows, 1, squeeze=False, height_ratios=(height, *[5] * rows)
    ).flat
    picture, matrix = upper.subplots(1, 2, width_ratios=(3, 2))
    for part, some in zip(lower, within, strict=True):
        matrices.draw(part, machine, some)
    boxes = _mesh(graph) if _is_mesh(graph) else _rows(graph)
    for device_id, box in boxes.items():
        _draw_device(picture, graph, graph.devices[device_id], box)
    _draw_links(picture, graph, boxes)
    _legend(picture, graph)
    picture.autoscale_view()
    picture.set_aspect("equal")
    picture.axis("off")
    _draw_matrix(matrix, graph)
    name = machine.title or machine.cpu_model or "machine"
    figure.suptitle("\n".join(textwrap.wrap(name, 110)), fontsize=13, parse_math=False)
    figure.savefig(path)


def _is_mesh(graph: Graph) -> bool:
    kinds = {"gpu"}
    direct = [
        link
        for link in graph.links
        if {graph.devices[link.a].kind, graph.devices[link.b].kind} == kinds
    ]
    return bool(direct) and len(graph.gpus) <= _MOST_LINES


def _mesh(graph: Graph) -> dict[str, _Box]:
    """Returns the boxes of GPUs that are drawn on a circle."""
    gpus = graph.gpus
    radius = max(1.6, 0.42 * len(gpus))
    boxes = {}
    for i, gpu in enumerate(gpus):
        angle = math.pi / 2 - 2 * math.pi * (i + 0.5) / len(gpus)
        x, y = radius * math.cos(angle), radius * math.sin(angle)
        boxes[gpu.id] = (x - 0.55, y - 0.55, 1.1, 1.1)
    return boxes


def _rows(graph: Graph) -> dict[str, _Box]:
    """Returns the boxes of nodes, GPUs, NICs and switches.

    Nodes are in a grid. Each has its GPUs in a row above its NICs and switches. Switches that all
    nodes share are below the grid.
    """
    nodes = list(dict.fromkeys(graph.node_of(gpu.id) for gpu in graph.gpus))
    across = 1 if len(nodes) < 3 else math.ceil(math.sqrt(len(nodes) / 2))
    most = max(sum(graph.node_of(gpu.id) == node for gpu in graph.gpus) for node in nodes)
    has_nics = graph.of_kind("nic") and len(graph.gpus) <= _MOST_DETAILED
    width, height = most * 1.25 + 0.5, 3.3 if has_nics else 2.0
    boxes: dict[str, _Box] = {}
    rows = math.ceil(len(nodes) / across)
    for i, node in enumerate(nodes):
        x, y = i % across * (width + 0.3), (rows - 1 - i // across) * (height + 0.3)
        if node is not None:
            boxes[node] = (x - 0.1, y - 0.1, width - 0.05, height)
        mine = [gpu for gpu in graph.gpus if graph.node_of(gpu.id) == node]
        for j, gpu in enumerate(mine):
            boxes[gpu.id] = (x + j * 1.25 + 0.1, y + height - 1.5, 1.1, 1.1)
        if node is None or len(graph.gpus) > _MOST_DETAILED:
            continue
        nics = graph.parts(node, "nic")
        for j, nic in enumerate(nics):
            boxes[nic.id] = (x + j * 1.25 + 0.5, y + 0.95, 0.6, 0.35)
        for j, switch in enumerate(graph.parts(node, "switch")):
            boxes[switch.id] = (x + 0.1, y + 0.1 + 0.5 * j, width - 0.5, 0.4)
    shared = [each for each in graph.parts(None, "switch") if graph.links_of(each.id)]
    total = across * (width + 0.3) - 0.8
    for j, switch in enumerate(shared):
        boxes[switch.id] = (0.1, -1.3 - 0.9 * j, total, 0.55)
    return boxes


def _draw_device(axes: Axes, graph: Graph, device: Device, box: _Box) -> None:
    from matplotlib.patches import FancyBboxPatch

    x, y, width, height = box
    is_frame = device.kind == "node"
    fill = "none" if is_frame else _FILLS.get(device.kind, "#e4e4ea")
    style = "round,pad=0,rounding_size=0.08"
    patch = FancyBboxPatch(
        (x, y), width, height, boxstyle=style, facecolor=fill, edgecolor="0.35", lw=0.8, zorder=3
    )
    patch.set_zorder(1 if is_frame else 3)
    axes.add_patch(patch)
    # The size of text is in points, while that of boxes is in the picture's units. So smaller boxes
    # need a smaller font.
    size = 8.0 if len(graph.gpus) <= 4 else 6.5 if len(graph.gpus) <= _MOST_DETAILED else 4.5
    label = device.id.rpartition("/")[2]
    if device.kind == "switch":
        label = f"{label} x{device.count}" if device.count > 1 else label
        label += f" ({device.name})" if device.name else ""
    if device.kind != "gpu":
        top = y + height - 0.17 if is_frame else y + height / 2
        place = (x + 0.12, top) if is_frame else (x + width / 2, top)
        side = "left" if is_frame else "center"
        axes.text(*place, label, ha=side, va="center", fontsize=size, zorder=5, parse_math=False)
        return
    axes.text(x + width / 2, y + height - 0.14, label, ha="center", va="center", fontsize=size)
    axes.texts[-1].set_zorder(5)
    if len(graph.gpus) <= _MOST_DETAILED:
        _draw_parts(axes, graph, device, (x + 0.08, y + 0.08, width - 0.16, height - 0.38), size)
    else:
        _tile(axes, graph, device, (x + 0.1, y + 0.1, width - 0.2, height - 0.45), size)


def _draw_parts(axes: Axes, graph: Graph, device: Device, box: _Box, size: float) -> None:
    """Draws the dies of a GPU as tiles, two in a row, and in each its dies and compute units."""
    parts = [
        part
        for part in graph.parts(device.id)
        if part.kind in ("io_die", "die", "l2_partition") and part.count == 1
    ]
    if not parts:
        _tile(axes, graph, device, box, size)
        return
    x, y, width, height = box
    rows = math.ceil(len(parts) / 2)
    for i, part in enumerate(parts):
        tile = (
            x + i % 2 * width / 2 + 0.015,
            y + (rows - 1 - i // 2) * height / rows + 0.015,
            width / 2 - 0.03,
            height / rows - 0.03,
        )
        _fill(axes, part, tile)
        inner = [each for each in graph.parts(part.id) if each.kind == "die"]
        for j, die in enumerate(inner):
            left = tile[0] + j * tile[2] / len(inner) + 0.02
            box = (left, tile[1] + 0.05, tile[2] / len(inner) - 0.04, tile[3] - 0.1)
            _fill(axes, die, box)
            _units(axes, graph, die, box, size * 0.72)
        if not inner:
            _units(axes, graph, part, tile, size * 0.8)


def _tile(axes: Axes, graph: Graph, device: Device, box: _Box, size: float) -> None:
    dies = [part for part in graph.parts(device.id) if part.kind in ("die", "l2_partition")]
    count = max(1, sum(part.count for part in dies))
    x, y, width, height = box
    for i in range(count if dies else 0):
        _fill(axes, dies[0], (x + i * width / count + 0.01, y, width / count - 0.02, height))
    if not dies:
        _units(axes, graph, device, box, size * 0.8)


def _fill(axes: Axes, device: Device, box: _Box) -> None:
    from matplotlib.patches import Rectangle

    fill = _FILLS.get(device.kind, "#e4e4ea")
    axes.add_patch(
        Rectangle(box[:2], box[2], box[3], facecolor=fill, edgecolor="0.5", lw=0.4, zorder=4)
    )


def _units(axes: Axes, graph: Graph, device: Device, box: _Box, size: float) -> None:
    units = graph.count(device.id, "compute_unit")
    if units:
        name = next((part.id for part in graph.of_kind("compute_unit")), "").rpartition("/")[2]
        x, y = box[0] + box[2] / 2, box[1] + box[3] / 2
        text = f"{units}\n{name.upper()}s"
        axes.text(x, y, text, ha="center", va="center", fontsize=size, zorder=6, linespacing=0.9)


def _draw_links(axes: Axes, graph: Graph, boxes: dict[str, _Box]) -> None:
    is_wide = len(graph.gpus) > _MOST_LINES
    drawn = set()
    for link in graph.links:
        ends = [link.a, link.b]
        if is_wide:
            # Replaces a GPU by its node, so that one line stands for the links of all its GPUs.
            ends = [graph.node_of(end) or end for end in ends]
        if not all(end in boxes for end in ends) or ends[0] == ends[1]:
            continue
        if (key := (*sorted(ends), link.kind)) in drawn:
            continue
        drawn.add(key)
        (ax, ay), (bx, by) = _ends_of(boxes[ends[0]], boxes[ends[1]])
        width = 0.8 + 0.3 * math.log2(link.count or 1)
        colour = _COLOURS.get(link.kind, "0.4")
        axes.plot([ax, bx], [ay, by], color=colour, lw=width, alpha=0.75, zorder=2)


def _ends_of(a: _Box, b: _Box) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the ends of a line between two boxes. It is vertical if one box is much wider."""
    ax, bx = a[0] + a[2] / 2, b[0] + b[2] / 2
    for narrow, wide in ((a, b), (b, a)):
        # Begins left of the middle of a wide box, where no NIC is in the way.
        middle = narrow[0] + narrow[2] * (0.5 if narrow[2] < 1 else 0.2)
        if wide[2] > 2 * narrow[2] and wide[0] <= middle <= wide[0] + wide[2]:
            ax = bx = middle
    return (ax, a[1] + a[3] / 2), (bx, b[1] + b[3] / 2)


def _legend(axes: Axes, graph: Graph) -> None:
    """Adds a legend with the routes between GPUs: their links, latency and bandwidth."""
    from matplotlib.lines import Line2D

    lines = []
    for route, pairs in ways(graph).items():
        if route is None:
            lines.append(Line2D([], [], color="none", label=f"{pairs} pairs: no known link"))
            continue
        us = "latency unknown" if route.latency_us is None else f"{route.latency_us:.3g} us one way"
        gbps = route.bandwidth_gbps
        wide = "GB/s unknown" if gbps is None else f"{gbps:.4g} GB/s"
        count = f"{pairs} pair{'s' * (pairs > 1)}"
        # Colours a route over a network as a network, because that is its slowest link.
        kind = "network" if "network" in route.kinds else route.kinds[0]
        told = f"{way_name(graph, route)}: {us}, {wide} ({count})"
        lines.append(Line2D([], [], color=_COLOURS.get(kind, "0.4"), lw=2.5, label=told))
    axes.legend(
        handles=lines, loc="upper center", bbox_to_anchor=(0.5, -0.01), fontsize=9, frameon=False
    )


def _draw_matrix(axes: Axes, graph: Graph) -> None:
    gpus = graph.gpus
    values = [[math.nan] * len(gpus) for _ in gpus]
    for i, a in enumerate(gpus):
        for j in range(i):
            route = graph.route(a.id, gpus[j].id)
            if route is not None and route.latency_us is not None:
                values[i][j] = values[j][i] = route.latency_us
    known = [us for row in values for us in row if not math.isnan(us)]
    if not known:
        axes.axis("off")
        axes.text(0.5, 0.5, "no latency between GPUs is known", ha="center", fontsize=11)
        return
    top = 1.1 * max(known)
    image = axes.imshow(values, cmap="YlGnBu", vmin=0, vmax=top)
    axes.set_facecolor("0.92")
    if axes.figure is not None:
        axes.figure.colorbar(image, ax=axes, shrink=0.75).set_label("one-way latency (us)")
    step = -(-len(gpus) // 18)
    ticks = range(0, len(gpus), step)
    axes.set_xticks(ticks, [str(i) for i in ticks], fontsize=8)
    axes.set_yticks(ticks, [str(i) for i in ticks], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel("to GPU")
    axes.set_ylabel("from GPU")
    if len(gpus) > _MOST_NAMED:
        return
    for i, row in enumerate(values):
        for j, us in enumerate(row):
            text = "" if i == j else "?" if math.isnan(us) else f"{us:.2g}"
            colour = "white" if us > 0.6 * top else "black"
            size = 7 if len(gpus) > 8 else 10
            axes.text(j, i, text, ha="center", va="center", color=colour, fontsize=size)
