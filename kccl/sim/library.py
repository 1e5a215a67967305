"""Loads kernels that were compiled for the simulator."""

import ctypes
import itertools
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base.abi import ffi, lib
from ..base.errors import CompileError
from ..jit import cache, names

_loaded: "dict[Path, Library]" = {}
_lock = threading.Lock()


class _Shape(ctypes.Structure):
    # The layout of kccl::entries::ParameterShape (csrc/sim/entries.inc).
    _fields_ = (("num_bytes", ctypes.c_uint32), ("alignment", ctypes.c_uint32))


@dataclass(frozen=True)
class Entry:
    """A kernel that can be launched.

    Attributes:
        address: Address of its entry, a `void (*)(const void* arguments)`.
        parameters: (bytes, alignment) of each parameter, in order.
        kinds: A letter for each parameter; see base/scalars.py.
        pointees: (kind, bytes) of the numbers that each parameter points to; None for a parameter
            that does not point to numbers.
        run_block: On the host, a function (address, arguments, block, num_blocks).
    """

    address: int
    parameters: tuple[tuple[int, int], ...]
    kinds: str
    pointees: tuple[tuple[str, int] | None, ...]
    run_block: Any = field(default=None, repr=False, compare=False)

    @property
    def argument_bytes(self) -> int:
        """Returns the bytes of all arguments together, each aligned."""
        end = 0
        for num_bytes, alignment in self.parameters:
            end = -(-end // alignment) * alignment + num_bytes
        return end


@dataclass(frozen=True)
class Library:
    """A library of kernels that this process has loaded. It is never unloaded.

    Attributes:
        path: Its file.
        begin, end: The range of addresses where it is mapped.
        entries: Its kernels, in the order given to compile_sim().
    """

    path: Path
    begin: int
    end: int
    entries: tuple[Entry, ...]
    _handle: Any = field(repr=False)


def load(path: Path, num_kernels: int, *, on_host: bool = False) -> Library:
    """Loads a library that cache.compile_sim() made, unless it is loaded already.

    Args:
        path: The library's file.
        num_kernels: The number of the library's kernels.
        on_host: True if compile_host() made it.

    Raises:
        CompileError: The library uses a function that is not defined.
    """
    with _lock:
        if path not in _loaded:
            _loaded[path] = _load(path, num_kernels, on_host)
        return _loaded[path]


def library_at(address: int) -> Library | None:
    """Returns the library that has this code address; None if there is none."""
    with _lock:
        known = list(_loaded.values())
    return next((each for each in known if each.begin <= address < each.end), None)


def library_kernel(
    kernel: str,
    *,
    dtype: str = "float32",
    op: str = "sum",
    world_size: int = 0,
    warp_size: int,
    csrc: Path = cache.CSRC,
) -> Entry:
    """Returns one of KCCL's own kernels, which take one KcclCall. Compiles and loads it if needed.

    Args:
        kernel: Name of the kernel, as in "put".
        dtype, op: Element type and operator, for kernels that reduce.
        world_size: See names.expression().
        warp_size: 32 or 64.
        csrc: Root of the device source.
    """
    expression = names.expression(kernel, dtype, op, csrc, world_size)
    path = cache.compile_sim(
        names.source(kernel, csrc), [expression], warp_size=warp_size, name=kernel, csrc=csrc
    )
    (entry,) = load(path, 1).entries
    return entry


def _load(path: Path, num_kernels: int, on_host: bool) -> Library:
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompileError(
            f"the compiled kernel does not load: {error}. A kernel may call functions of its "
            "headers only, and must access memory that other threads see through mem.cuh",
            log=str(error),
        ) from error
    run_block = None
    if on_host:
        function = run_block = handle.kccl_host_run_block
        numbers = (ctypes.c_uint32, ctypes.c_uint32)
        function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, *numbers), None
    else:
        function = handle.kccl_sim_attach
        function.argtypes, function.restype = (ctypes.c_void_p,), None
        function(int(ffi.cast("uintptr_t", lib.kccl_sim_engine_table())))
    entries = tuple(_entry(handle, index, run_block) for index in range(num_kernels))
    begin, end = _mapping(_address(function))
    return Library(path, begin, end, entries, handle)


def _entry(handle: Any, index: int, run_block: Any) -> Entry:
    shapes_of = getattr(handle, f"kccl_sim_shapes_{index}")
    shapes_of.restype = ctypes.POINTER(_Shape)
    shapes = shapes_of()
    # The array of shapes ends with an entry of alignment 0.
    count = next(i for i in itertools.count() if shapes[i].alignment == 0)
    parameters = tuple((shapes[i].num_bytes, shapes[i].alignment) for i in range(count))
    kinds_of = getattr(handle, f"kccl_sim_kinds_{index}")
    kinds_of.restype = ctypes.c_char_p
    pointees_of = getattr(handle, f"kccl_sim_pointees_{index}")
    pointees_of.restype = ctypes.POINTER(ctypes.c_uint32)
    numbers = pointees_of()
    pointees = tuple(
        (chr(number & 0xFF), number >> 8) if number else None for number in numbers[:count]
    )
    address = _address(getattr(handle, f"kccl_sim_entry_{index}"))
    return Entry(address, parameters, kinds_of().decode(), pointees, run_block)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _mapping(address: int) -> tuple[int, int]:
    """Returns the range of addresses where the file with this function is mapped."""
    maps = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, device, inode, *_ = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in span.split("-"))
        maps.append((begin, end, (device, inode)))
    file = next(file for begin, end, file in maps if begin <= address < end)
    parts = [(begin, end) for begin, end, its_file in maps if its_file == file]
    return min(parts)[0], max(parts)[1]
