"""Parameters of which `make test` runs some, and `make test-all` the others."""

from itertools import product

import pytest


def long_after(num, values):
    """The values as parameters of a test, tuples as several of them. All but the first num are
    marked long.
    """
    values = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [[]] * num + [pytest.mark.long] * (len(values) - num)
    return [pytest.param(*each, marks=mark) for each, mark in zip(values, marks, strict=True)]


def long_beyond_each(*axes):
    """The product of the axes as parameters of a test. Those not marked long are as few as have
    each value of each axis.
    """
    axes = [list(axis) for axis in axes]
    short = {tuple(k % len(axis) for axis in axes) for k in range(max(map(len, axes)))}
    return [
        pytest.param(
            *(axis[at] for axis, at in zip(axes, places, strict=True)),
            marks=[] if places in short else pytest.mark.long,
        )
        for places in product(*(range(len(axis)) for axis in axes))
    ]
