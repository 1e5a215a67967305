"""Finds parts of a GPU in a probe's measurements: halves of L2, and groups of compute units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from statistics import fmean, median, pstdev

_LEAST_SEPARATION = 4.0
"""The least distance of the means of two halves, in standard deviations within a half. Noise that
is split at its middle has 2.7."""
_LEAST_SHARE = 0.25  # the least fraction of the rows in a half
_FEWEST = 8  # rows; fewer can look like two halves by chance
_OUTLIER = 4.0  # deviations are clipped to this many times the median deviation
_TURNS = 30  # iterations that find the first singular vectors
_AGREE = 0.98  # the fraction of columns that must agree with their granule
_LIKENESS = 0.5  # the least correlation of two rows of one group

Table = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Groups of rows. Each group has the columns to which its rows are near.

    Attributes:
        rows: Number of each row's group. The first row is in group 0.
        columns: For each column, the number of the group that is near to it.
        near, far: Mean values of rows in columns of their group, and in other columns.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    near: float
    far: float


def halves(values: Table) -> Split | None:
    """Splits rows and columns of latencies into two groups; None if there are no two clear groups.

    It subtracts the means of rows and columns, and splits by the signs of the first singular
    vectors of the rest.

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
    # A row has low values in near columns, so a row and its near columns have opposite signs.
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
    """Splits rows into groups whose latencies correlate, as those of dies beside one memory do.

    Returns None if all rows correlate, or no two do.

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
    """Subtracts the means of rows and columns from the values, and clips far outliers."""
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
    """Returns the number of neighbouring columns that have one home.

    It is the largest power of two for which almost all columns agree with their aligned group. It
    is at most a quarter of all columns.
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
    """Joins compute units into groups: the connected components of the sets in `together`.

    Args:
        units: All units. A unit in no set is a group by itself.
        together: Sets of units that ran blocks of one cluster, so belong to one group.
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
