"""The benchmarked collectives, one file each: inputs, expected outputs, calls of peers."""

from __future__ import annotations

import importlib
import pkgutil

from ..harness.collective import Collective

NAMES = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> Collective:
    """Returns the table of one collective, from the file of the same name."""
    table: Collective = importlib.import_module(f".{name}", __name__).COLLECTIVE
    return table


def callable_outside_kernels() -> list[str]:
    """Returns the names of the collectives that bench/tune can tune: the host makes them by one
    call, and a plan chooses the algorithm of that call.
    """
    tables = [load(name) for name in NAMES]
    planned = [each for each in tables if each.is_planned and not each.is_composed]
    return [each.name for each in planned if not each.only_in_kernels]
