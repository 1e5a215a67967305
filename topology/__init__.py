"""The parts of a machine (CPUs, GPUs, their dies, switches), and the distances between them.

Needs only the standard library. `table` and `machines_table` also need `rich`, `plot` needs
`matplotlib`, and `with_gpus` uses `pynvml` if it is installed.
"""

from .accelerators import with_gpus
from .blocks import BLOCK_LAYOUTS, BlockPlacement, Interleave, place_blocks
from .blocks import PATTERNS as BLOCK_PATTERNS
from .cgroups import folders as cgroup_folders
from .cost import ALGORITHMS as PREDICTED
from .cost import ERROR as PREDICTION_ERROR
from .cost import MOST_RANKS as MOST_PREDICTED_RANKS
from .cost import (
    UNMEASURED_ERROR,
    Call,
    Figures,
    error_of,
    figures_of,
    is_recorded,
    predict,
    ranked,
)
from .curves import plot_decode, plot_scaling
from .decode import DECODE_ERROR, Projection, Shape, models, predict_token
from .device_tables import machines_table
from .discovery import discover, recorded
from .drawing import plot
from .gpu_probes import GpuProbe, PairsProbe, with_gpu_probe, with_pairs_probe
from .graph import Graph, Route
from .groups import Groups, groups
from .health import complaints
from .heatmap import check_plot
from .hwloc import from_hwloc
from .layout import Flag, Layout, faults
from .memory import Room, memory_room
from .model import FORMAT, Cache, Cpu, Machine, NumaNode
from .nearest import differences, nearest
from .parts import SOURCE_KINDS, Access, Device, Figure, Link, Source
from .pinning import core_of, pin
from .placement import (
    LAYOUTS,
    Placement,
    place,
    place_cores,
    place_threads,
    predict_barrier,
)
from .probes import core_to_core, spread
from .readings import QUANTITIES, Matrix, Quantity, Range, Reading
from .render import table
from .scaling import CHAINED, Chain, Fabric, fabric_of, predict_chain, study

__all__ = [
    "BLOCK_LAYOUTS",
    "BLOCK_PATTERNS",
    "CHAINED",
    "DECODE_ERROR",
    "FORMAT",
    "LAYOUTS",
    "MOST_PREDICTED_RANKS",
    "PREDICTED",
    "PREDICTION_ERROR",
    "QUANTITIES",
    "SOURCE_KINDS",
    "UNMEASURED_ERROR",
    "Access",
    "BlockPlacement",
    "Cache",
    "Call",
    "Chain",
    "Cpu",
    "Device",
    "Fabric",
    "Figure",
    "Figures",
    "Flag",
    "GpuProbe",
    "Graph",
    "Groups",
    "Interleave",
    "Layout",
    "Link",
    "Machine",
    "Matrix",
    "NumaNode",
    "PairsProbe",
    "Placement",
    "Projection",
    "Quantity",
    "Range",
    "Reading",
    "Room",
    "Route",
    "Shape",
    "Source",
    "cgroup_folders",
    "check_plot",
    "complaints",
    "core_of",
    "core_to_core",
    "differences",
    "discover",
    "error_of",
    "fabric_of",
    "faults",
    "figures_of",
    "from_hwloc",
    "groups",
    "is_recorded",
    "machines_table",
    "memory_room",
    "models",
    "nearest",
    "pin",
    "place",
    "place_blocks",
    "place_cores",
    "place_threads",
    "plot",
    "plot_decode",
    "plot_scaling",
    "predict",
    "predict_barrier",
    "predict_chain",
    "predict_token",
    "ranked",
    "recorded",
    "spread",
    "study",
    "table",
    "with_gpu_probe",
    "with_gpus",
    "with_pairs_probe",
]


def __dir__() -> list[str]:
    return __all__
