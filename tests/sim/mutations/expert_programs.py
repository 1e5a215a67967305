"""Programs that show planted bugs of dispatch and combine."""

import ctypes
from dataclasses import dataclass, field

import numpy as np
from layers_of_experts import Layers, kernel_name
from sim_machine import Machine, Outcome, compiled
from worlds import World

from kccl.base import abi

from .program import NARROW

# What ranks end with when one has too many rows for an expert.
TOO_MANY = (abi.lib.kKcclCapacityPassed, abi.lib.kKcclAborted)


class KcclWindow(ctypes.Structure):
    """A KcclWindow, which goes by value."""

    _fields_ = (
        ("num_bytes", ctypes.c_uint64),
        ("rank", ctypes.c_int32),
        ("world_size", ctypes.c_int32),
        ("address", ctypes.c_uint64 * abi.MAX_WORLD_SIZE),
    )


class LayersScript:
    """Layers of experts in one launch of each rank."""

    def __init__(self, layers, by, machine, statuses, shape):
        self._layers, self._statuses = layers, statuses
        self._world = World(
            layers.world_size, machine.simulation(), machine.settings(), csrc=machine.csrc
        )
        kernel = compiled(
            *("experts.cuh", kernel_name(layers.element, by), machine.warp_size, machine.csrc)
        )
        windows = self._world.window(layers.window_bytes)
        addresses = [window.ctypes.data for window in windows]
        self._parts = [layers.part(rank) for rank in range(layers.world_size)]
        self._initial = [
            {name: array.copy() for name, array in part.items()} for part in self._parts
        ]
        threads = shape["warps"] * machine.warp_size
        self._program = []
        for rank, part in enumerate(self._parts):
            window = KcclWindow(layers.window_bytes, rank, layers.world_size)
            window.address[: len(addresses)] = addresses
            comm = self._world.device_comm(rank)
            launch = self._world.launch(
                *(rank, kernel, comm, window, *layers.numbers, *part.values()),
                **{"grid": shape["grid"], "block": threads},
            )
            self._program.append([launch])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._world.close()

    def run(self, seed):
        """Runs the layers under one seed. Returns the Outcome."""
        for part, initial in zip(self._parts, self._initial, strict=True):
            for name, array in part.items():
                np.copyto(array, initial[name])
        report = self._world.run(self._program, seed)
        kind = message = ""
        if report.findings:
            kind, message = report.findings[0].kind, str(report.findings[0])
        elif any(report.statuses):
            are_right = all(each in self._statuses for each in report.statuses)
            kind = "failed_call" if are_right else "wrong_status"
            message = f"statuses {report.statuses}"
        else:
            try:
                for rank, part in enumerate(self._parts):
                    self._layers.check(rank, part)
            except AssertionError as wrong:
                kind, message = "wrong_data", str(wrong)
        return Outcome(kind, message, report.stats, report.statuses)


@dataclass(frozen=True)
class LayersProgram:
    """As Program, for layers of experts.

    Attributes:
        layers: Those that are made.
        by: Who makes the calls: a member of By in tests/kernels/experts.cuh.
        shape: The launch's: "grid" blocks of so many "warps".
    """

    layers: Layers
    by: str
    shape: dict = field(default_factory=lambda: {"grid": 1, "warps": 2})
    machine: dict = field(default_factory=lambda: NARROW)
    right: str = ""
    statuses: tuple = ()

    def script(self, **machine):
        made = Machine(**{**self.machine, **machine})
        return LayersScript(self.layers, self.by, made, self.statuses, self.shape)


_GRID = {"grid": 2, "warps": 1}
PROGRAMS = {
    "layers of experts": LayersProgram(Layers(3, 4, top_k=3, rounds=4, seed=1), "Channel"),
    "layers of experts by grids": LayersProgram(
        Layers(2, 3, rounds=4, seed=2), "Grid", _GRID, {**NARROW, "num_channels": 2}
    ),
    "layers of few experts": LayersProgram(
        Layers(2, 2, rounds=3, seed=4), "Block", {"grid": 1, "warps": 4}
    ),
    "too many rows for an expert": LayersProgram(
        Layers(2, 3, rounds=3, capacity=2, seed=3),
        "Channel",
        machine={**NARROW, "ends_when_stuck": False},
        right="failed_call",
        statuses=TOO_MANY,
    ),
}
