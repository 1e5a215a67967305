"""GPUs through their vendor's driver: devices, memory, streams, graphs, kernels.

The names below are public, for programs that need the driver without PyTorch or CuPy.
"""

from .driver import (
    LEGACY_STREAM,
    Device,
    attempt,
    attribute,
    call,
    constant,
    device,
    drain,
    error_text,
    fill,
    function_address,
    intervals_us,
    launch,
    make_stream,
    num_devices,
    pick_device,
    read,
    read_into,
    synchronize,
    uncaptured,
    write,
)
from .table import DriverError

__all__ = [
    "LEGACY_STREAM",
    "Device",
    "DriverError",
    "attempt",
    "attribute",
    "call",
    "constant",
    "device",
    "drain",
    "error_text",
    "fill",
    "function_address",
    "intervals_us",
    "launch",
    "make_stream",
    "num_devices",
    "pick_device",
    "read",
    "read_into",
    "synchronize",
    "uncaptured",
    "write",
]
