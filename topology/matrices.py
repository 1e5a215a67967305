"""Draws the matrices that a probe has measured within a GPU (matplotlib)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from .model import Machine
from .readings import QUANTITIES, Matrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

_COLUMNS = {"unit_to_unit_us": "to compute unit", "near_ticks": "byte of a buffer"}
_TITLES = {
    "unit_to_unit_us": "a word between two compute units, one way",
    "near_ticks": "a load from L2, by where its line is",
}
_MOST_GPUS = 2  # of more GPUs no matrices are drawn, because differences would be hard to see
_TICKS = 12
_MOST_NAMED = 48  # with more parts, names would overlap, so only some units' numbers are drawn


def within_gpus(machine: Machine) -> list[list[Matrix]]:
    """Returns the matrices of each of the first _MOST_GPUS GPUs that have matrices."""
    found: dict[str, list[Matrix]] = {}
    for matrix in machine.matrices:
        if matrix.what in _COLUMNS:
            found.setdefault(matrix.of, []).append(matrix)
    return list(found.values())[:_MOST_GPUS]


def draw(figure: SubFigure, machine: Machine, matrices: list[Matrix]) -> None:
    """Draws the matrices of one GPU beside each other.

    Lines separate the halves of the GPU. Ticks name the smallest known part with each unit.
    """
    row = figure.subplots(1, len(matrices), squeeze=False, width_ratios=(4, 5)[: len(matrices)])[0]
    for axes, matrix in zip(row, matrices, strict=True):
        values = [[math.nan if v is None else v for v in cells] for cells in matrix.values]
        known = sorted(v for cells in values for v in cells if not math.isnan(v))
        if not known:
            continue
        # The colours span the 1st to 99th percentile, because outliers would hide all differences.
        least, most = known[len(known) // 100], known[-1 - len(known) // 100]
        is_square = matrix.rows == matrix.columns
        shape = "equal" if is_square else "auto"
        image = axes.imshow(
            values, cmap="YlGnBu", vmin=least, vmax=most, aspect=shape, interpolation="nearest"
        )
        axes.set_facecolor("0.92")
        figure.colorbar(image, ax=axes, pad=0.02).set_label(QUANTITIES[matrix.what].unit)
        _name_units(axes, machine, matrix, is_square)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel(_COLUMNS[matrix.what])
        axes.set_ylabel("from compute unit")
        axes.set_title(f"{matrix.of}: {_TITLES[matrix.what]}", fontsize=10)


def _name_units(axes: Axes, machine: Machine, matrix: Matrix, is_square: bool) -> None:
    """Draws ticks with the names of parts, and a line where the outermost part changes."""
    places = {
        unit: device.id.split("/")[1:-1]
        for device in machine.devices
        if device.units and device.id.startswith(f"{matrix.of}/")
        for unit in device.units
    }
    runs = [
        (place, [at for at, _ in run])
        for place, run in groupby(
            enumerate(matrix.rows), lambda each: places.get(int(each[1])) or [str(each[1])]
        )
    ]
    at = [sum(run) / len(run) for _, run in runs]
    deepest = max(len(place) for place, _ in runs)
    names = [place[-1] if len(place) == deepest else "?" for place, _ in runs]
    if len(runs) > _MOST_NAMED:
        at, names = _some(matrix.rows)
    axes.set_yticks(at, names, fontsize=7)
    if is_square:
        axes.set_xticks(at, names, fontsize=7, rotation=90)
    else:
        axes.set_xticks(*_some(matrix.columns), fontsize=7)
    for (before, _), (place, run) in pairwise(runs):
        if before[0] == place[0] or len(runs) > _MOST_NAMED:
            continue
        axes.axhline(run[0] - 0.5, color="white", lw=2)
        if is_square:
            axes.axvline(run[0] - 0.5, color="white", lw=2)


def _some(ids: Sequence[str | int]) -> tuple[list[float], list[str]]:
    """Returns the positions and names of at most _TICKS ids, evenly spaced."""
    at = range(0, len(ids), -(-len(ids) // _TICKS))
    return [float(i) for i in at], [str(ids[i]) for i in at]
