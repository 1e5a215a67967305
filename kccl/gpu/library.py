"""Compiled kernels, loaded once a process for all devices of their architecture."""

import functools
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..jit import cache, rtc
from ..jit import names as kernels
from ..plan.limits import Needs
from . import driver

_loaded: dict[Path, tuple["Entry", ...]] = {}
_lock = threading.Lock()


@dataclass(frozen=True)
class Entry:
    """A kernel that can be launched.

    Attributes:
        handle: The kernel, as Table.load_code() returned it.
        offsets: (offset, bytes) of each parameter, in order.
    """

    handle: Any
    offsets: tuple[tuple[int, int], ...]
    _functions: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    _needs: dict[int, Needs] = field(default_factory=dict, repr=False)

    @cached_property
    def parameters(self) -> tuple[tuple[int, int], ...]:
        """Returns (bytes, alignment) of each parameter; an alignment may be larger than the
        type's.
        """
        return tuple((size, (offset & -offset) or 1) for offset, size in self.offsets)

    @property
    def kinds(self) -> str:
        """Returns a letter for each parameter, as in base/scalars.py. The driver does not tell the
        kinds.
        """
        return "?" * len(self.offsets)

    def function(self, shared_bytes: int = 0) -> int:
        """Returns the kernel on the current device, with so much dynamic shared memory."""
        gpu = driver.table()
        key = int(gpu.call(gpu.names.current_ordinal)), shared_bytes
        if key not in self._functions:
            with driver.uncaptured():
                self._functions[key] = driver.function(self.handle, shared_bytes)
        return self._functions[key]

    def needs(self) -> Needs:
        """Returns what the compiled code needs of the current device, and allows."""
        function = self.function()
        if function not in self._needs:
            with driver.uncaptured():
                gpu = driver.table()
                self._needs[function] = Needs(
                    threads=gpu.max_threads(function),
                    registers=gpu.function_attribute(function, "NUM_REGS"),
                    static_shared_bytes=gpu.function_attribute(function, "SHARED_SIZE_BYTES"),
                )
        return self._needs[function]


def load(path: Path) -> tuple[Entry, ...]:
    """Returns the kernels of what RuntimeCompiler.compile() returned, in order. They stay loaded.

    Raises:
        BackendError: There is no driver, or it refuses the code.
    """
    with _lock:
        if path not in _loaded:
            names, code = rtc.read(path)
            with driver.any_device(), driver.uncaptured():
                loaded = driver.table().load_code(code, names)
            _loaded[path] = tuple(Entry(kernel, offsets) for kernel, offsets in loaded)
        return _loaded[path]


def library_kernel(
    kernel: str, *, dtype: str, op: str, world_size: int, arch: str, csrc: Path = cache.CSRC
) -> Entry:
    """Returns one of the library's own kernels, compiled if necessary. Its one parameter is a
    KcclCall.

    Args:
        kernel: Name, as in "put".
        dtype, op: For kernels that reduce.
        world_size: The communicator's number of ranks.
        arch: The architecture, such as "sm_90a" or "gfx942".
        csrc: Root of the device source.
    """
    (entry,) = load(compile_kernel(kernel, dtype, op, world_size, arch, csrc))
    return entry


def compile_kernel(
    kernel: str, dtype: str, op: str, world_size: int, arch: str, csrc: Path = cache.CSRC
) -> Path:
    """Returns the kernel's entry in the cache, compiled if need be. Needs no GPU.

    Args:
        kernel, dtype, op, world_size, arch, csrc: See library_kernel().
    """
    name = kernels.expression(kernel, dtype, op, csrc, world_size)
    source = kernels.source(kernel, csrc)
    compiler = driver.vendor_of(arch).compiler
    return compiler.compile(source, [name], arch=arch, name=kernel, csrc=csrc)


@functools.cache
def resident_blocks(device: driver.Device, function: int, threads: int) -> int:
    """Returns how many blocks of a kernel of the library the device holds at once."""
    with device.current():
        return driver.resident_blocks(function, threads, 0) * device.multiprocessors
