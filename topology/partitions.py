"""Finds the parts of a GPU in what a probe measured: halves of L2, and groups of compute units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from statistics import fmean, median, pstdev

_LEAST_SEPARATION = 4.0
"""Distance of the halves, in deviations within them. Noise that is cut in two has 2.7."""
_LEAST_SHARE = 0.25  # of the rows, in each half
_FEWEST = 8  # rows; fewer are easily cut in two by chance
_OUTLIER = 4.0  # times the median deviation; larger ones are cut to it
_TURNS = 30
_AGREE = 0.98
_LIKENESS = 0.5  # correlation of two rows of one group

Table = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Groups of rows, each of which is near to its own columns.

    Attributes:
        rows: Number of each row's group; the first row is in group 0.
        columns: The group of rows that is near to each column.
        near, far: Mean value of rows with their own columns, and with the others'.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    near: float
    far: float


def halves(values: Table) -> Split | None:
    """Split rows and columns of latencies in two, by the first singular vectors of what is left
    without the means of rows and columns. None if the rows have no two clear groups.

    Args:
        values: Rows of equal length: the latency from each compute unit to each address.
    """
    if len(values) < _FEWEST or len(values[0]) < 2:
        return None
    rows = _centred(values)
    columns = [list(column) for column in zip(*rows, strict=True)]
    scores = max(rows, key=lambda row: sum(map(mul, row, row)))
    for _ in range(_TURNS):
        by_row = [sum(map(mul, row, scores)) for row in rows]
        scores = [sum(map(mul, column, by_row)) for column in columns]
        size = max(map(abs, scores))
        if size == 0:
            return None
        scores = [each / size for each in scores]
    by_row = [sum(map(mul, row, scores)) for row in rows]
    # A row has high values where its own columns are not.
    sign = -1 if by_row[0] < 0 else 1
    sides = tuple(int(each * sign < 0) for each in by_row)
    homes = tuple(int(each * sign > 0) for each in scores)
    share = sum(sides) / len(sides)
    if not _LEAST_SHARE <= share <= 1 - _LEAST_SHARE or len(set(homes)) == 1:
        return None
    groups = [[each for each, side in zip(by_row, sides, strict=True) if side == k] for k in (0, 1)]
    within = max(pstdev(group) for group in groups)
    distance = abs(fmean(groups[0]) - fmean(groups[1]))
    if distance < _LEAST_SEPARATION * within:
        return None
    return _split(values, sides, homes)


def alike(values: Table) -> Split | None:
    """Split rows in groups whose latencies go up and down together, as those of dies beside one
    memory do. None if all rows are alike, or no two are.

    Args:
        values: Rows of equal length: the latency from each die to each address.
    """
    if len(values) < 2 or len(values[0]) < 2:
        return None
    rows = _centred(values)
    sizes = [sum(map(mul, row, row)) ** 0.5 for row in rows]
    pairs = [
        (i, j)
        for i in range(len(rows))
        for j in range(i)
        if sum(map(mul, rows[i], rows[j])) > _LIKENESS * sizes[i] * sizes[j] > 0
    ]
    groups = joined(range(len(rows)), pairs)
    if len(groups) in (1, len(rows)):
        return None
    sides = tuple(next(k for k, group in enumerate(groups) if i in group) for i in range(len(rows)))
    homes = []
    for column in zip(*rows, strict=True):
        means = [fmean(column[i] for i in group) for group in groups]
        homes.append(means.index(min(means)))
    return _split(values, sides, tuple(homes))


def _split(values: Table, sides: tuple[int, ...], homes: tuple[int, ...]) -> Split | None:
    cells: tuple[list[float], list[float]] = ([], [])
    for side, row in zip(sides, values, strict=True):
        for home, value in zip(homes, row, strict=True):
            cells[side != home].append(value)
    near, far = fmean(cells[0]), fmean(cells[1])
    return Split(rows=sides, columns=homes, near=near, far=far) if near < far else None


def _centred(values: Table) -> list[list[float]]:
    """The values without the means of their rows and columns; far outliers are cut."""
    of_rows = [fmean(row) for row in values]
    of_columns = [fmean(column) for column in zip(*values, strict=True)]
    mean = fmean(of_rows)
    rows = [
        [
            value - of_row - of_column + mean
            for value, of_column in zip(row, of_columns, strict=True)
        ]
        for row, of_row in zip(values, of_rows, strict=True)
    ]
    most = _OUTLIER * median(abs(value) for row in rows for value in row)
    return [[max(-most, min(most, value)) for value in row] for row in rows]


def granule(homes: Sequence[int]) -> int:
    """How many neighbouring columns have one home: the largest power of two whose aligned groups
    agree, up to a quarter of all.
    """
    size = 1
    while size * 8 <= len(homes):
        groups = [homes[i : i + size * 2] for i in range(0, len(homes), size * 2)]
        agree = sum(max(group.count(0), group.count(1)) for group in map(list, groups))
        if agree < _AGREE * len(homes):
            break
        size *= 2
    return size


def joined(units: Iterable[int], together: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    """Groups of compute units, of which each two are joined by sets of units that were together.

    Args:
        units: All units. One that was never with another is a group by itself.
        together: Sets of units that ran a cluster of blocks, which one group did.
    """
    parent = {unit: unit for unit in units}

    def top(unit: int) -> int:
        while parent[unit] != unit:
            parent[unit] = unit = parent[parent[unit]]
        return unit

    for some in together:
        first, *others = some
        for other in others:
            parent[top(other)] = top(first)
    groups: dict[int, list[int]] = {}
    for unit in sorted(parent):
        groups.setdefault(top(unit), []).append(unit)
    return tuple(sorted(map(tuple, groups.values())))
