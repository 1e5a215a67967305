"""Parameters of tests, divided among `make test`, `make test-all` and `make sim-mutations`."""

from itertools import product

import pytest


def long_after(num, values):
    """The values as parameters of a test, tuples as several of them. All but the first num are
    marked long.
    """
    values = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [[]] * num + [pytest.mark.long] * (len(values) - num)
    return [pytest.param(*each, marks=mark) for each, mark in zip(values, marks, strict=True)]


def hunted(bugs, kind=lambda bug: None):
    """Planted bugs as parameters of a test. `make test-all` hunts the first one of each kind, and
    `make sim-mutations` all.
    """
    firsts = {kind(bug): bug for bug in reversed(list(bugs))}.values()
    marks = [pytest.mark.long if bug in firsts else pytest.mark.mutation for bug in bugs]
    return [pytest.param(bug, marks=mark) for bug, mark in zip(bugs, marks, strict=True)]


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
