"""Fits the constants of a sum of terms to measured times, by least squares of relative errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def fit(
    rows: Sequence[tuple[Mapping[str, float], float]], fixed: Mapping[str, float]
) -> dict[str, float]:
    """Finds the constants for which each sum of constant times term is nearest to its time.

    Args:
        rows: (terms by name, time) of each measurement.
        fixed: Constants that are given and not fitted.

    Returns:
        A constant for each name. A constant that would be negative is 0.

    Raises:
        ValueError: The rows do not determine the constants.
    """
    names = sorted({name for terms, _ in rows for name in terms if name not in fixed})
    kept = names
    while True:
        values = _solve(rows, fixed, kept)
        lowest = min(values, key=lambda name: values[name])
        if values[lowest] >= 0:
            return {name: values.get(name, 0.0) for name in names} | dict(fixed)
        kept = [name for name in kept if name != lowest]


def _solve(
    rows: Sequence[tuple[Mapping[str, float], float]],
    fixed: Mapping[str, float],
    names: Sequence[str],
) -> dict[str, float]:
    """Solves the normal equations by Gauss-Jordan elimination. Returns a constant for each name."""
    size = len(names)
    matrix = [[0.0] * (size + 1) for _ in names]
    for terms, time in rows:
        scaled = [terms.get(name, 0.0) / time for name in names]
        known = sum(constant * terms.get(name, 0.0) for name, constant in fixed.items())
        rest = 1 - known / time
        for i, a in enumerate(scaled):
            for j, b in enumerate(scaled):
                matrix[i][j] += a * b
            matrix[i][size] += a * rest
    for i in range(size):
        pivot = max(range(i, size), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) < 1e-12:
            raise ValueError(f"the rows do not tell {names[i]!r} from the other constants")
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for k in range(size):
            if k != i:
                factor = matrix[k][i] / matrix[i][i]
                matrix[k] = [a - factor * b for a, b in zip(matrix[k], matrix[i], strict=True)]
    return {name: matrix[i][size] / matrix[i][i] for i, name in enumerate(names)}
