"""Compiles your own kernels at run time, and launches them like functions.

    module = kccl.compile(source, ["mine"])
    module.kernel("mine")(comm, comm.device_comm(), x)

The source is C++. It includes <kccl/kccl.cuh>, marks kernels with KCCL_KERNEL, and uses kccl::mem
for every access to memory that another thread may see. examples/05_simulate_a_kernel.py has one.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .backends.device_comm import DeviceComm
from .base import arguments, arrays, scalars
from .base.abi import ffi
from .base.copying import not_copied
from .base.errors import InvalidArgument
from .jit import cache
from .jit.source import read_source
from .plan.spec import GPUS, MOST_THREADS
from .ranks.windows import Window, window_at
from .sim.library import load

if TYPE_CHECKING:
    from .comm import Communicator

_COMM_BYTES = ffi.sizeof("KcclDeviceComm")
_PASS_IT = "pass comm.device_comm(), by which the kernel reaches its peers"
# The targets that run on this machine's CPU.
_ON_CPU = ("sim", "host")
TARGETS = (*GPUS, "host")
_WINDOW_BYTES: int = ffi.sizeof("KcclWindow")
_not_copied = not_copied(
    "compiled code is loaded into its process",
    "call kccl.compile() in each process; it takes the code from the cache on disk",
)


class Module:
    """Compiled kernels.

    Attributes:
        target: "sim", "cuda", "hip" or "host".
        warp_size: Warp size of the target.
        arch: For GPUs the architecture, as in "sm_90a" or "gfx942"; for "sim" and "host" "".
        names: Names of the kernels.
        source: The source text; "" if it is not kept.
    """

    __reduce_ex__ = _not_copied

    def __init__(
        self,
        target: str,
        warp_size: int,
        names: Sequence[str],
        load: Callable[[], Sequence[Any]],
        arch: str = "",
        source: str = "",
    ) -> None:
        self.source = source
        self.target = target
        self.warp_size = warp_size
        self.arch = arch
        self.names = tuple(names)
        self._load = load

    @cached_property
    def _entries(self) -> dict[str, Any]:
        # Loaded at first use, because loading needs a driver, and compiling for a GPU does not.
        return dict(zip(self.names, self._load(), strict=True))

    def kernel(self, name: str) -> "Kernel":
        """Returns the kernel with this name.

        Raises:
            InvalidArgument: The module has no such kernel.
            BackendError: There is no driver, or it refuses the code.
        """
        if name not in self.names:
            raise InvalidArgument(f"kernel is {name!r}, must be one of {', '.join(self.names)}")
        return Kernel(self, name, self._entries[name])

    def __repr__(self) -> str:
        return f"<kccl.Module for {self.target}: {', '.join(self.names)}>"


class Kernel:
    """A compiled kernel. Calling it launches it.

    Attributes:
        name: Its name, as given to compile().
        module: Its module.
    """

    __reduce_ex__ = _not_copied

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
        block: int | None = None,
        shared_bytes: int = 0,
        stream: Any = None,
    ) -> None:
        """Launches the kernel on this rank.

        On a GPU the call returns when the kernel is enqueued, on a CPU when it has ended.

        Args:
            comm: The communicator of this rank. Its backend must be the module's target.
            *args: The kernel's arguments. A DeviceComm, a NumPy scalar and a ctypes value are
                passed by value, and so is a Window, which the kernel takes as a `kccl::Window`. A
                Python or NumPy number is converted to the parameter's type, and refused if it does
                not fit, as a fraction for an integer. An array with a writable buffer or DLPack
                becomes a pointer to its first element. On a CPU its elements must be of the type
                that the parameter points to. An array of comm.empty() also fits a `kccl::Window`.
                On a GPU only the size of a parameter is known: a NumPy scalar of that size is
                passed as it is, an int or bool becomes an integer, a float a float or double: pass
                a `float` 2.0, not 2.
            grid: Number of blocks.
            block: Threads of each block, a multiple of the warp size; 64 when None. On the host it
                is 1.
            shared_bytes: Bytes of dynamic shared memory of each block.
            stream: As in Communicator.all_reduce, for the first array among the arguments.

        Under KCCL_CHECK=1 the launch of a kernel that takes a DeviceComm is collective: the ranks
        first compare its name, grid, block and shared_bytes. The simulator compares the calls
        in kernels instead, always.

        Raises:
            InvalidArgument: An argument does not fit the kernel's parameter, or under KCCL_CHECK=1
                the ranks launch different kernels; nothing ran.
            BackendError: The driver refused the launch.
            Timeout, PeerLost: A wait of the library failed in this kernel or in an earlier call.
            ProtocolError: The simulator has a finding.
        """
        if not hasattr(comm, "context"):
            raise InvalidArgument(
                f"the first argument of {self.name} is {_a(comm)}, must be the communicator, as in "
                "kernel(comm, comm.device_comm(), x)"
            )
        if comm.backend != self.module.target:
            raise InvalidArgument(
                f"comm has backend {comm.backend!r}, the kernel is for {self.module.target!r}"
            )
        if self.module.target == "host":
            if block not in (None, 1):
                raise InvalidArgument(
                    f"block is {block}, must be 1: on the host a block is one OS thread. Loops "
                    "from kccl::block().index() by kccl::block().size() need no change"
                )
            block = 1
        grid, block = check_grid(grid, 64 if block is None else block, self.module.warp_size)
        shared_bytes = arguments.not_negative("shared_bytes", shared_bytes)
        comm.context.backend.load(self)
        data, keep = self.pack(args)
        pointers = [
            (index, each) for index, each in enumerate(keep) if isinstance(each, arrays.Pointer)
        ]
        current = next((each.stream for _, each in pointers), None)
        if stream is None and current is not None:
            stream = current()
        if any(isinstance(arg, DeviceComm) for arg in args):
            comm.context.check_agreement(
                f"launch of {self.name}, grid {grid}, block {block}, shared_bytes {shared_bytes}"
            )
        comm.context.launch(
            self,
            data,
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            stream=stream,
            arrays=[(at, each.address, each.nbytes, args[at]) for at, each in pointers],
        )
        del keep

    def pack(self, args: Sequence[Any]) -> tuple[bytes, list[Any]]:
        """Returns the bytes of the arguments one after another, and objects that keep their memory
        alive.

        Raises:
            InvalidArgument: The kernel has another number of arguments or an argument of another
                size, or a number does not fit its parameter.
        """
        wanted = self.entry.parameters
        if len(args) != len(wanted):
            is_missing = any(num_bytes == _COMM_BYTES for num_bytes, _ in wanted) and not any(
                isinstance(arg, DeviceComm) for arg in args
            )
            raise InvalidArgument(
                f"{self.name} takes {len(wanted)} arguments, got {len(args)}"
                f"{f' and no DeviceComm among them: {_PASS_IT}' if is_missing else ''}"
            )
        data = bytearray()
        keep = []
        each = enumerate(zip(args, wanted, self.entry.kinds, strict=True))
        for index, (arg, (num_bytes, alignment), kind) in each:
            if num_bytes == _COMM_BYTES and not _is_struct(arg):
                raise InvalidArgument(
                    f"argument {index} of {self.name} is {_a(arg)}, the parameter has {num_bytes} "
                    f"bytes, as many as a kccl::DeviceComm: {_PASS_IT}"
                )
            if isinstance(arg, DeviceComm) and not arg.is_open():
                what = f"argument {index} of {self.name} is the DeviceComm of a communicator that"
                raise InvalidArgument(f"{what} is closed, must be one of an open communicator")
            if hasattr(arg, "context"):
                raise InvalidArgument(
                    f"argument {index} of {self.name} is {_a(arg)}, which is no kernel's argument: "
                    "kernels take a DeviceComm, from comm.device_comm()"
                )
            value, kept = _bytes_of(arg, f"argument {index}", num_bytes, kind, self.module.target)
            if len(value) != num_bytes:
                is_window = num_bytes == _WINDOW_BYTES
                hint = ", as a kccl::Window has, which comm.window() returns" if is_window else ""
                raise InvalidArgument(
                    f"argument {index} of {self.name} is a {type(arg).__name__} of {len(value)} "
                    f"bytes, the parameter has {num_bytes}{hint}"
                )
            if isinstance(kept, arrays.Pointer):
                pointees = getattr(self.entry, "pointees", {index: None})
                scalars.check_elements(arg, pointees[index], f"argument {index} of {self.name}")
            data += bytes(-len(data) % alignment)
            data += value
            keep.append(kept)
        return bytes(data), keep


def _a(arg: Any) -> str:
    name = type(arg).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _is_struct(arg: Any) -> bool:
    """Tells whether an argument's bytes may be passed by value as a struct."""
    import numpy as np

    return isinstance(arg, DeviceComm | np.generic | ctypes.Structure | ctypes.Union)


def _bytes_of(arg: Any, name: str, num_bytes: int, kind: str, target: str) -> tuple[bytes, Any]:
    """Returns the bytes of an argument as the kernel gets it, and an object that keeps its memory
    alive.
    """
    import numpy as np

    if isinstance(arg, DeviceComm):
        return arg.data, None
    if isinstance(arg, Window):
        return arg.for_kernels(), arg
    number = _number(arg, name, num_bytes, kind)
    if number is not None:
        value = scalars.scalar_bytes(number, name, num_bytes, kind)
        return value or _alone(number), None
    if isinstance(arg, np.generic):
        return arg.tobytes(), None
    if isinstance(arg, ctypes._SimpleCData | ctypes.Structure | ctypes.Union):
        return bytes(arg), None
    if target not in _ON_CPU:
        from .gpu import arrays as device_arrays

        found = device_arrays.pointer(arg, name)
    else:
        found = arrays.pointer(arg, name)
    window = window_at(found.address) if num_bytes == _WINDOW_BYTES else None
    if window is not None:
        return window.for_kernels(), found
    return bytes(ctypes.c_uint64(found.address)), found


def _number(arg: Any, name: str, num_bytes: int, kind: str) -> bool | int | float | None:
    """Returns the number to convert for the parameter; None if the bytes of `arg` are passed."""
    import numpy as np

    is_known = kind in scalars.NUMBERS
    value = arg
    # NumPy's types are tested first, because a float64 is a Python float, too.
    if isinstance(arg, np.generic):
        # The scalar's bytes are passed if the parameter is no number, or if the parameter has an
        # unknown kind and the scalar's size.
        if kind == "V" or (not is_known and arg.nbytes == num_bytes):
            return None
        value = arg.item() if isinstance(arg, np.bool_ | np.integer | np.floating) else None
        if not isinstance(value, bool | int | float) and is_known:
            raise InvalidArgument(
                f"{name} is {arg!r}, must be a bool, an integer or a float of at most 64 bits: the "
                f"kernel's parameter is {scalars.words(num_bytes, kind)}"
            )
    elif isinstance(arg, ctypes._SimpleCData) and is_known:
        value = arg.value
    return value if isinstance(value, bool | int | float) else None


def _alone(number: Any) -> bytes:
    """Returns 8 bytes for a number that does not fit the parameter, for the error message."""
    return bytes(ctypes.c_double(number) if isinstance(number, float) else ctypes.c_int64(number))


def check_grid(grid: Any, block: Any, warp_size: int) -> tuple[int, int]:
    """Returns the number of blocks, and of threads of each, as integers.

    Raises:
        InvalidArgument: No GPU can launch this.
    """
    grid = arguments.between("grid", grid, 1, 2**31 - 1)
    block = arguments.between("block", block, 1, MOST_THREADS)
    if block % warp_size:
        raise InvalidArgument(f"block is {block}, must be a multiple of the warp size, {warp_size}")
    return grid, block


def compile(
    source: "str | os.PathLike[str]",
    kernels: Sequence[str],
    *,
    target: str = "sim",
    warp_size: int | None = None,
    arch: str = "",
    include_dirs: Sequence["str | os.PathLike[str]"] = (),
) -> Module:
    """Compiles kernels, or takes them from the cache on disk.

    Args:
        source: The source text as a str, or the path of a file as a pathlib.Path.
        kernels: Names of kernels in the source, or of template instances, as in "scale<float>".
        target: "sim" for the simulator, which runs on this machine's CPU; "cuda" for NVIDIA's GPUs,
            "hip" for AMD's; "host" for the CPU itself, where each block is an OS thread and a warp
            has one thread.
        warp_size: Warp size of the simulated GPUs, 32 or 64; 32 when None. For other targets None,
            or the warp size that they have.
        arch: Architecture for GPUs, as in "sm_90a" or "gfx942". When "", that of this thread's
            current GPU. With an architecture, no GPU is needed until a kernel is launched.
        include_dirs: More folders to search for headers. The folder of a source file is always
            searched.

    Raises:
        InvalidArgument: An argument is wrong.
        CompileError: The source does not compile. The error has the compiler's log.
        BackendError: There is no compiler, or the cache cannot be written to.
    """
    if target not in TARGETS:
        raise InvalidArgument(f"target is {target!r}, must be one of {', '.join(TARGETS)}")
    if isinstance(kernels, str) or not kernels or not all(isinstance(k, str) for k in kernels):
        raise InvalidArgument(f"kernels is {kernels!r}, must be a list of names")
    text, name, own_folder = read_source(source)
    folders = own_folder + [Path(folder) for folder in include_dirs]
    if target not in _ON_CPU:
        return _compile_for_gpus(target, text, kernels, arch, name, folders, warp_size)
    if arch:
        raise InvalidArgument(f'arch is {arch!r}, must be "": target is {target!r}')
    if target == "host":
        if warp_size not in (None, 1):
            raise InvalidArgument(f"warp_size is {warp_size!r}, must be 1: target is 'host'")
        file = cache.compile_host(text, kernels, name=name, include_dirs=folders)
        loaded = load(file, len(kernels), on_host=True).entries
        return Module(target, 1, kernels, lambda: loaded)
    warp_size = 32 if warp_size is None else warp_size
    file = cache.compile_sim(text, kernels, warp_size=warp_size, name=name, include_dirs=folders)
    entries = load(file, len(kernels)).entries
    return Module(target, warp_size, kernels, lambda: entries, source=text)


def _compile_for_gpus(
    target: str,
    source: str,
    kernels: Sequence[str],
    arch: str,
    name: str,
    folders: Sequence[Path],
    warp_size: int | None,
) -> Module:
    from .gpu import driver, library

    vendor = driver.VENDORS[target]
    if warp_size not in (None, vendor.warp_size):
        raise InvalidArgument(
            f"warp_size is {warp_size!r}, must be {vendor.warp_size}: target is {target!r}"
        )
    if not arch:
        driver.choose(vendor)
        arch = driver.pick_device(0).arch
    file = vendor.compiler.compile(source, kernels, arch=arch, name=name, include_dirs=folders)
    code = library.load(file, arch)
    count = len(kernels)
    return Module(target, vendor.warp_size, kernels, lambda: library.entries(code, count), arch)
