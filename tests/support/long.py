"""Parameters of which `make test` runs some, and `make test-all` the others."""

import pytest


def long_after(num, values):
    """The values as parameters of a test, tuples as several of them. All but the first num are
    marked long.
    """
    values = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [[]] * num + [pytest.mark.long] * (len(values) - num)
    return [pytest.param(*each, marks=mark) for each, mark in zip(values, marks, strict=True)]
