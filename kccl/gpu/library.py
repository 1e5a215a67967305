"""Compiled kernels, and when a GPU loads them.

Loading a kernel may wait for the end of the kernels that run on its GPU. CUDA's documentation and
measurements on NVIDIA's GPUs say so, and HIP's documentation does not promise otherwise. A kernel
of KCCL ends when its peers have come, and a peer may come only after the call that loads. So what
a call needs is loaded before any kernel can wait:

    kccl.init(), and whatever else makes a communicator, loads every kernel that only moves data,
    and every kernel that reduces and is in the cache on disk: because a program before has used
    it, or because of `kccl warm`. It loads the modules that kccl.compile() has made so far, too.
    Between nodes the host moves the data, so such a communicator compiles none then.

    kccl.compile() loads what it has compiled on the GPU of this thread's communicator.

    A kernel that reduces, and that the cache does not have yet, is compiled and loaded by the
    first call that needs it, or when that call is prepared.

A GPU loads code for itself, and waits for its own kernels only. A loaded kernel is found without a
lock. Each GPU has a lock for each file, which is held while the GPU loads the file. So no rank that
is a thread waits for another rank's GPU. If two ranks share a GPU, one loads and the other waits
for it. If both loaded, the first to finish could launch a kernel that waits for the other rank,
while that rank's load waits for the end of this kernel.
"""

import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ..base import dtypes
from ..jit import cache, rtc
from ..jit import names as kernels
from ..jit.headers import Headers
from ..plan.limits import Needs
from . import driver
from .instances import Instance, has_types, instances


class _Loaded(NamedTuple):
    """A kernel on one device: the driver's function, and (offset, bytes) of each parameter."""

    function: int
    offsets: tuple[tuple[int, int], ...]


class Code:
    """The kernels of a file that RuntimeCompiler.compile() returned, on the devices that have
    loaded them. They stay loaded.
    """

    def __init__(self, path: Path, *, is_kept: bool = False) -> None:
        """Loads nothing yet.

        Args:
            path: The file.
            is_kept: True to read the file now, because it may be gone when a device loads the code.
        """
        self._path = path
        self._content = rtc.read(path) if is_kept else None
        # Number of a device -> the loaded kernels.
        self._on: dict[int, tuple[_Loaded, ...]] = {}
        # A lock for each device, held while it loads code or gets a function's attribute. A signal
        # handler may load while its thread does, so the locks are reentrant.
        self._locks: dict[int, threading.RLock] = {}
        # For each of the driver's functions: the most dynamic shared memory that its launches may
        # have so far, and what needs() has returned.
        self._shared: dict[int, int] = {}
        self._needs: dict[int, Needs] = {}

    def load(self) -> tuple[_Loaded, ...]:
        """Returns the kernels on the current device. The first call there loads them.

        Raises:
            BackendError: There is no driver, or it refuses the code.
        """
        gpu = driver.table()
        ordinal = int(gpu.call(gpu.names.current_ordinal))
        loaded = self._on.get(ordinal)
        if loaded is None:
            # Another thread may be loading this code on the device, and hold the lock. This thread
            # waits for it: loading the code a second time would take at least as long, because both
            # wait for the same kernels.
            with self._lock(ordinal):
                loaded = self._on.get(ordinal)
                if loaded is None:
                    names, code = self._content or rtc.read(self._path)
                    with driver.uncaptured():
                        found = tuple(_Loaded(*each) for each in gpu.load_code(code, names))
                    loaded = self._on.setdefault(ordinal, found)
        return loaded

    def _lock(self, ordinal: int) -> threading.RLock:
        return self._locks.setdefault(ordinal, threading.RLock())

    def anywhere(self) -> tuple[_Loaded, ...]:
        """Returns the kernels on some device that has loaded them, else on the current one."""
        return next(iter(list(self._on.values())), None) or self.load()

    def allow(self, function: int, shared_bytes: int) -> None:
        """Lets a function have `shared_bytes` of dynamic shared memory on the current device."""
        if shared_bytes <= self._shared.get(function, 0):
            return
        gpu = driver.table()
        # The driver keeps one number for each function. The lock keeps threads from lowering what
        # another one has set.
        with self._lock(int(gpu.call(gpu.names.current_ordinal))):
            if shared_bytes > self._shared.get(function, 0):
                with driver.uncaptured():
                    gpu.allow_shared_bytes(function, shared_bytes)
                self._shared[function] = shared_bytes

    def needs(self, function: int) -> Needs:
        """Returns the resources that a function needs on the current device, and the most threads
        that a block of it may have.
        """
        if function not in self._needs:
            with driver.uncaptured():
                gpu = driver.table()
                self._needs[function] = Needs(
                    threads=gpu.max_threads(function),
                    registers=gpu.function_attribute(function, "NUM_REGS"),
                    static_shared_bytes=gpu.function_attribute(function, "SHARED_SIZE_BYTES"),
                )
        return self._needs[function]


@dataclass(frozen=True)
class Entry:
    """A kernel that can be launched.

    Attributes:
        code: The code that has it.
        index: The kernel's index among the kernels of the code.
    """

    code: Code
    index: int

    @cached_property
    def offsets(self) -> tuple[tuple[int, int], ...]:
        """Returns (offset, bytes) of each parameter, in order."""
        return self.code.anywhere()[self.index].offsets

    @cached_property
    def parameters(self) -> tuple[tuple[int, int], ...]:
        """Returns (bytes, alignment) of each parameter. The alignment is that of the parameter's
        offset, which may be larger than its type's.
        """
        return tuple((size, (offset & -offset) or 1) for offset, size in self.offsets)

    @property
    def kinds(self) -> str:
        """Returns a letter for each parameter, as in base/scalars.py. The driver does not tell the
        kinds.
        """
        return "?" * len(self.offsets)

    def function(self, shared_bytes: int = 0) -> int:
        """Returns the driver's function of the kernel on the current device, whose launches may
        have `shared_bytes` of dynamic shared memory.
        """
        function = self.code.load()[self.index].function
        self.code.allow(function, shared_bytes)
        return function

    def needs(self) -> Needs:
        """See Code.needs()."""
        return self.code.needs(self.function())


# ---- Code by its file --------------------------------------------------------------------------

# File in the cache -> the code of a library kernel.
_loaded: dict[Path, Code] = {}
# File in the cache -> the code of a user's module, and its architecture.
_modules: dict[Path, tuple[Code, str]] = {}
# Device that has communicators -> the world sizes whose kernels it has loaded, and whether those
# that were not in the cache were compiled for it. _here has the device of this thread's newest
# communicator.
_served: dict[driver.Device, set[tuple[int, bool]]] = {}
_here = threading.local()


def load(path: Path, arch: str) -> Code:
    """Returns the code of a user's module, from what RuntimeCompiler.compile() returned.

    It is loaded on the GPU of this thread's communicator, if there is one and it has this
    architecture; else by the communicators that are made later, or by the first launch.

    Raises:
        BackendError: The driver refuses the code.
    """
    code, _ = _modules.setdefault(path, (Code(path, is_kept=True), arch))
    device = getattr(_here, "device", None) or (next(iter(_served)) if len(_served) == 1 else None)
    if device is not None and device.arch == arch:
        with device.current():
            code.load()
    return code


def entries(code: Code, count: int) -> tuple[Entry, ...]:
    """Returns the first `count` kernels of code, to be launched.

    Raises:
        BackendError: There is no driver.
    """
    _ = driver.table().binding
    return tuple(Entry(code, index) for index in range(count))


def serve(device: driver.Device, world_size: int, which: str) -> None:
    """Loads on a device what the calls of a communicator may need. See the top of this file.

    Args:
        device: The GPU of this thread's rank.
        world_size: The communicator's number of ranks.
        which: KCCL_PRELOAD.

    Raises:
        BackendError, CompileError: A kernel cannot be compiled, or the driver refuses it.
    """
    _here.device = device
    served, compiles = _served.setdefault(device, set()), which == "all"
    with device.current():
        for code, arch in list(_modules.values()):
            if arch == device.arch:
                code.load()
        if which != "none" and not {(world_size, compiles), (world_size, True)} & served:
            for path in _ready(device.arch, world_size, compiles=compiles):
                _code_of(path).load()
            served.add((world_size, compiles))


def _ready(arch: str, world_size: int, *, compiles: bool) -> list[Path]:
    """Returns the files of the library's kernels that a communicator loads when it is made."""
    every = instances([world_size], [dtype.name for dtype in dtypes.ALL])
    if compiles:
        movers = [(*each, arch) for each in every if not has_types(each[0])]
        with ThreadPoolExecutor(min(len(movers), len(os.sched_getaffinity(0)))) as pool:
            moving = list(pool.map(compile_kernel, *zip(*movers, strict=True)))
        every = [each for each in every if has_types(each[0])]
    else:
        moving = []
    find = functools.partial(_find, arch=arch, folder=cache.cache_folder(), headers=Headers())
    found = map(find, every)
    return [*moving, *filter(None, found)]


def _find(instance: Instance, arch: str, folder: Path, headers: Headers) -> Path | None:
    kernel, dtype, op, world_size = instance
    name = kernels.expression(kernel, dtype, op, cache.CSRC, world_size)
    source = kernels.source(kernel, cache.CSRC)
    compiler = driver.vendor_of(arch).compiler
    return compiler.find(source, [name], arch=arch, name=kernel, folder=folder, headers=headers)


def _code_of(path: Path) -> Code:
    return _loaded.setdefault(path, Code(path))


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
    return Entry(_code_of(compile_kernel(kernel, dtype, op, world_size, arch, csrc)), 0)


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
def occupancy(device: driver.Device, function: int, threads: int) -> int:
    """Returns how many blocks of a kernel of the library a multiprocessor runs at once."""
    with device.current():
        return driver.resident_blocks(function, threads, 0)
