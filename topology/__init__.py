"""The parts of a machine (CPUs, caches, NUMA nodes), and the distances between them.

Needs only the standard library. `table` also needs `rich`, and `plot` needs `matplotlib`.
"""

from .cgroups import folders as cgroup_folders
from .discovery import discover, recorded
from .heatmap import check_plot, plot
from .memory import Room, memory_room
from .model import FORMAT, Cache, Cpu, Machine, NumaNode
from .pinning import assign, core_of, pin
from .probes import core_to_core, spread
from .render import table

__all__ = [
    "FORMAT",
    "Cache",
    "Cpu",
    "Machine",
    "NumaNode",
    "Room",
    "assign",
    "cgroup_folders",
    "check_plot",
    "core_of",
    "core_to_core",
    "discover",
    "memory_room",
    "pin",
    "plot",
    "recorded",
    "spread",
    "table",
]


def __dir__() -> list[str]:
    return __all__
