"""The parts of a machine (CPUs, caches, NUMA nodes), and the distances between them.

Needs only the standard library. `table` also needs `rich`, and `plot` needs `matplotlib`.
"""

from .discovery import discover, recorded
from .model import FORMAT, Cache, Cpu, Machine, NumaNode
from .probes import core_to_core, spread
from .render import plot, table

__all__ = [
    "FORMAT",
    "Cache",
    "Cpu",
    "Machine",
    "NumaNode",
    "core_to_core",
    "discover",
    "plot",
    "recorded",
    "spread",
    "table",
]


def __dir__() -> list[str]:
    return __all__
