"""Kernels of one's own: compiled from source at run time, then called like functions.

    module = kccl.compile(source, ["mine"])
    module.kernel("mine")(comm, comm.device_comm(), x)

The source is C++ in the dialect of csrc/include/kccl: it includes <kccl/kccl.cuh>, marks kernels
with KCCL_KERNEL, and makes every access that another thread may see through kccl::mem.
examples/05_simulate_a_kernel.py has one.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backends.base import DeviceComm
from .base import arguments, arrays
from .base.errors import InvalidArgument
from .jit import cache
from .sim.library import load

if TYPE_CHECKING:
    from .comm import Communicator

TARGETS = ("sim", "cuda")
MAX_THREADS = 1024  # of a block, on every GPU


class Module:
    """Compiled kernels.

    Attributes:
        target: "sim" or "cuda".
        warp_size: That they were compiled for.
        arch: On "cuda" the architecture, as in "sm_90a"; else "".
        names: Of its kernels.
    """

    def __init__(
        self,
        target: str,
        warp_size: int,
        names: Sequence[str],
        load: Callable[[], Sequence[Any]],
        arch: str = "",
    ) -> None:
        self.target = target
        self.warp_size = warp_size
        self.arch = arch
        self.names = tuple(names)
        self._load = load

    @cached_property
    def _entries(self) -> dict[str, Any]:
        # What was compiled for a GPU can be loaded only where there is one.
        return dict(zip(self.names, self._load(), strict=True))

    def kernel(self, name: str) -> "Kernel":
        """One of the kernels.

        Raises:
            InvalidArgument: It was not among those compiled.
        """
        if name not in self.names:
            raise InvalidArgument(f"kernel is {name!r}, must be one of {', '.join(self.names)}")
        return Kernel(self, name, self._entries[name])

    def __repr__(self) -> str:
        return f"<kccl.Module for {self.target}: {', '.join(self.names)}>"


class Kernel:
    """A compiled kernel; calling it runs it.

    Attributes:
        name: As it was given to compile().
        module: The module that has it.
    """

    def __init__(self, module: Module, name: str, entry: Any) -> None:
        self.module = module
        self.name = name
        self.entry = entry

    def __repr__(self) -> str:
        return f"<kccl.Kernel {self.name} for {self.module.target}>"

    def __call__(
        self,
        comm: "Communicator",
        *args: Any,
        grid: int = 1,
        block: int = 64,
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        """Runs the kernel on this rank; returns when it has ended, on a GPU when it is enqueued.

        Args:
            comm: Where it runs; its backend is the module's target.
            *args: The kernel's arguments. A DeviceComm, a NumPy scalar and a ctypes value go by
                value; a Python int is an int64, a float a double, a bool a bool; an array (what
                exports a writable buffer, or DLPack) is a pointer to its first element.
            grid: Number of blocks.
            block: Threads of each, a multiple of the warp size.
            shared_bytes: Dynamic shared memory of each block.
            stream: As in Communicator.all_reduce, for the first array among the arguments.

        Raises:
            InvalidArgument: An argument does not fit the kernel's parameter; nothing ran.
            Timeout, PeerLost: A wait of the library failed in the kernel.
            ProtocolError: The simulator found something.
        """
        if comm.backend != self.module.target:
            raise InvalidArgument(
                f"comm has backend {comm.backend!r}, the kernel is for {self.module.target!r}"
            )
        grid, block = launch_shape(grid, block, self.module.warp_size)
        shared_bytes = arguments.not_negative("shared_bytes", shared_bytes)
        data, keep = self.pack(args)
        view = next((each for each in keep if isinstance(each, arrays.ArrayView)), None)
        comm.context.launch(
            self, data, view, grid=grid, block=block, shared_bytes=shared_bytes, stream=stream
        )
        del keep

    def pack(self, args: Sequence[Any]) -> tuple[bytes, list[Any]]:
        """The arguments one behind the other, and what keeps the memory they point to.

        Raises:
            InvalidArgument: Their number or a size is not the kernel's.
        """
        wanted = self.entry.parameters
        if len(args) != len(wanted):
            raise InvalidArgument(f"{self.name} takes {len(wanted)} arguments, got {len(args)}")
        data = bytearray()
        keep = []
        for index, (arg, (num_bytes, alignment)) in enumerate(zip(args, wanted, strict=True)):
            value, kept = _bytes_of(arg, f"argument {index}", self.module.target)
            if len(value) != num_bytes:
                raise InvalidArgument(
                    f"argument {index} of {self.name} is a {type(arg).__name__} of {len(value)} "
                    f"bytes, the parameter has {num_bytes}"
                )
            data += bytes(-len(data) % alignment)
            data += value
            keep.append(kept)
        return bytes(data), keep


def _bytes_of(arg: Any, name: str, target: str) -> tuple[bytes, Any]:
    """An argument as the kernel gets it, and what keeps the memory that it points to."""
    import numpy as np

    if isinstance(arg, DeviceComm):
        return arg.data, None
    # Before Python's own, because some are subclasses of float.
    if isinstance(arg, np.generic):
        return arg.tobytes(), None
    if isinstance(arg, bool):
        return bytes(ctypes.c_bool(arg)), None
    if isinstance(arg, int):
        if not -(2**63) <= arg < 2**64:
            raise InvalidArgument(f"{name} is {arg}, must fit 64 bits")
        return bytes(ctypes.c_int64(arg)), None
    if isinstance(arg, float):
        return bytes(ctypes.c_double(arg)), None
    if isinstance(arg, ctypes._SimpleCData | ctypes.Structure | ctypes.Union):
        return bytes(arg), None
    if target == "cuda":
        from .gpu import arrays as device_arrays

        address, keep = device_arrays.pointer(arg, name)
        return bytes(ctypes.c_uint64(address)), keep
    address, keep = arrays.pointer(arg, name)
    return bytes(ctypes.c_uint64(address)), keep


def launch_shape(grid: Any, block: Any, warp_size: int) -> tuple[int, int]:
    """Grid and block sizes as integers.

    Raises:
        InvalidArgument: No GPU has such.
    """
    grid = arguments.between("grid", grid, 1, 2**31 - 1)
    block = arguments.between("block", block, 1, MAX_THREADS)
    if block % warp_size:
        raise InvalidArgument(f"block is {block}, must be a multiple of the warp size, {warp_size}")
    return grid, block


def compile(
    source: "str | os.PathLike[str]",
    kernels: Sequence[str],
    *,
    target: str = "sim",
    warp_size: int = 32,
    arch: str = "",
    include_dirs: Sequence["str | os.PathLike[str]"] = (),
) -> Module:
    """Compiles kernels; what was compiled before comes from a cache on disk.

    Args:
        source: The text, or the path of a file.
        kernels: Names of kernels in it, or of instances of templates, as in "scale<float>".
        target: "sim": the simulator, which runs on this machine's CPU; or "cuda".
        warp_size: 32 or 64, for the simulator.
        arch: For "cuda", as in "sm_90a"; this thread's device's when "". With one given no GPU is
            needed until a kernel is launched.
        include_dirs: Where else headers are looked for. A file's own folder is one of them.

    Raises:
        InvalidArgument: An argument is wrong.
        CompileError: The source does not compile; with the compiler's log.
        BackendError: There is no compiler.
    """
    if target not in TARGETS:
        raise InvalidArgument(f"target is {target!r}, must be one of {', '.join(TARGETS)}")
    if isinstance(kernels, str) or not kernels or not all(isinstance(k, str) for k in kernels):
        raise InvalidArgument(f"kernels is {kernels!r}, must be a list of names")
    folders = [Path(folder) for folder in include_dirs]
    name = "source"
    if not isinstance(source, str):
        path = Path(source)
        try:
            source = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"source {path} cannot be read: {error}") from error
        name = str(path)
        folders.insert(0, path.absolute().parent)
    if target == "cuda":
        return _compile_cuda(source, kernels, arch, name, folders, warp_size)
    if arch:
        raise InvalidArgument(f'arch is {arch!r}, must be "": target is {target!r}')
    file = cache.compile_sim(source, kernels, warp_size=warp_size, name=name, include_dirs=folders)
    entries = load(file, len(kernels)).entries
    return Module(target, warp_size, kernels, lambda: entries)


def _compile_cuda(
    source: str,
    kernels: Sequence[str],
    arch: str,
    name: str,
    folders: Sequence[Path],
    warp_size: int,
) -> Module:
    from .gpu import driver, library
    from .jit import nvrtc

    if warp_size != 32:
        raise InvalidArgument(f"warp_size is {warp_size!r}, must be 32: target is 'cuda'")
    arch = arch or driver.pick_device(0).arch
    file = nvrtc.compile_cuda(source, kernels, arch=arch, name=name, include_dirs=folders)
    return Module("cuda", warp_size, kernels, lambda: library.load(file), arch)
