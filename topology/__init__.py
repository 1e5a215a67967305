"""What a machine is made of and how far its parts are from each other.

Stands alone: standard library only, `rich` and `matplotlib` where `table` and `plot` need them.
"""

from .discovery import discover, recorded
from .model import FORMAT, Cache, Cpu, Device, Link, Machine, NumaNode
from .probes import core_to_core, spread
from .render import plot, table

__all__ = [
    "FORMAT",
    "Cache",
    "Cpu",
    "Device",
    "Link",
    "Machine",
    "NumaNode",
    "core_to_core",
    "discover",
    "plot",
    "recorded",
    "spread",
    "table",
]
