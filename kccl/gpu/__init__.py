"""GPUs through their vendor's driver: devices, memory, streams, graphs, kernels.

The names below are public, for programs that need the driver without PyTorch or CuPy.
"""

from . import driver
from .driver import (
    Device,
    attempt,
    attribute,
    backend,
    backend_of,
    begin_capture,
    call,
    constant,
    device,
    drain,
    driver_version,
    error_text,
    fill,
    function_address,
    has_finished,
    intervals_us,
    launch,
    make_stream,
    named,
    num_devices,
    pick_device,
    read,
    read_into,
    synchronize,
    synchronize_stream,
    uncaptured,
    write,
)
from .memory import Memory
from .table import DriverError

__all__ = [
    "LEGACY_STREAM",
    "Device",
    "DriverError",
    "Memory",
    "attempt",
    "attribute",
    "backend",
    "backend_of",
    "begin_capture",
    "call",
    "constant",
    "device",
    "drain",
    "driver_version",
    "error_text",
    "fill",
    "function_address",
    "has_finished",
    "intervals_us",
    "launch",
    "make_stream",
    "named",
    "num_devices",
    "pick_device",
    "read",
    "read_into",
    "synchronize",
    "synchronize_stream",
    "uncaptured",
    "write",
]

LEGACY_STREAM: int


def __getattr__(name: str) -> int:
    # LEGACY_STREAM differs between vendors, and the vendor is chosen when a GPU is first used.
    if name == "LEGACY_STREAM":
        return driver.legacy_stream()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
