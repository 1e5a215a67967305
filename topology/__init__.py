"""The parts of a machine (CPUs, GPUs, their dies, switches), and the distances between them.

Needs only the standard library. `table` and `machines_table` also need `rich`, `plot` needs
`matplotlib`, and `with_gpus` uses `pynvml` if it is installed.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cgroups import folders as cgroup_folders
from .discovery import discover, recorded
from .graph import Graph, Route
from .groups import Groups, groups
from .memory import Room, memory_room
from .model import FORMAT, Cache, Cpu, Machine, NumaNode
from .nearest import differences, nearest
from .parts import SOURCE_KINDS, Access, Device, Figure, Link, Source
from .pinning import core_of, pin
from .readings import QUANTITIES, Matrix, Quantity, Range, Reading

if TYPE_CHECKING:
    from .accelerators import with_gpus
    from .amd import amd_gpus
    from .blocks import BLOCK_LAYOUTS, BlockPlacement, Interleave, grid_counters, place_blocks
    from .blocks import PATTERNS as BLOCK_PATTERNS
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
    from .drawing import plot
    from .gpu_probes import GpuProbe, PairsProbe, with_gpu_probe, with_pairs_probe
    from .health import complaints
    from .heatmap import check_plot
    from .hwloc import from_hwloc
    from .layout import Flag, Layout, faults
    from .placement import (
        LAYOUTS,
        Placement,
        place,
        place_cores,
        place_threads,
        predict_barrier,
    )
    from .probes import core_to_core, spread
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
    "amd_gpus",
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
    "grid_counters",
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

# Public name -> the module that has it, and its name there if that is another one. It is imported
# when the name is first used, because a rank that starts needs none of them.
_LAZY = {
    "BLOCK_LAYOUTS": "blocks",
    "BLOCK_PATTERNS": "blocks.PATTERNS",
    "BlockPlacement": "blocks",
    "CHAINED": "scaling",
    "Call": "cost",
    "Chain": "scaling",
    "DECODE_ERROR": "decode",
    "Fabric": "scaling",
    "Figures": "cost",
    "Flag": "layout",
    "GpuProbe": "gpu_probes",
    "Interleave": "blocks",
    "LAYOUTS": "placement",
    "Layout": "layout",
    "MOST_PREDICTED_RANKS": "cost.MOST_RANKS",
    "PREDICTED": "cost.ALGORITHMS",
    "PREDICTION_ERROR": "cost.ERROR",
    "PairsProbe": "gpu_probes",
    "Placement": "placement",
    "Projection": "decode",
    "Shape": "decode",
    "UNMEASURED_ERROR": "cost",
    "amd_gpus": "amd",
    "check_plot": "heatmap",
    "complaints": "health",
    "core_to_core": "probes",
    "error_of": "cost",
    "fabric_of": "scaling",
    "faults": "layout",
    "figures_of": "cost",
    "from_hwloc": "hwloc",
    "grid_counters": "blocks",
    "is_recorded": "cost",
    "machines_table": "device_tables",
    "models": "decode",
    "place": "placement",
    "place_blocks": "blocks",
    "place_cores": "placement",
    "place_threads": "placement",
    "plot": "drawing",
    "plot_decode": "curves",
    "plot_scaling": "curves",
    "predict": "cost",
    "predict_barrier": "placement",
    "predict_chain": "scaling",
    "predict_token": "decode",
    "ranked": "cost",
    "spread": "probes",
    "study": "scaling",
    "table": "render",
    "with_gpu_probe": "gpu_probes",
    "with_gpus": "accelerators",
    "with_pairs_probe": "gpu_probes",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, own = _LAZY[name].partition(".")
    return getattr(import_module(f".{module}", __name__), own or name)


def __dir__() -> list[str]:
    return __all__
