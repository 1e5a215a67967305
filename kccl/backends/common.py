"""What one rank has on every backend in host memory: a state, a window, calls made ready."""

import math
from dataclasses import dataclass, field
from typing import Any

from .. import abi, arrays, dtypes
from ..abi import ffi, lib
from ..arrays import ArrayView
from ..errors import Error, InvalidArgument
from ..memory import Window, layout
from ..mesh import Mesh


@dataclass(frozen=True)
class Settings:
    """What all ranks of a communicator must agree on.

    Attributes:
        num_channels: Independent streams of calls.
        packet_bytes: Payload bytes of one ll16 or sentinel slot.
        staging_bytes: Bytes of one staging slot.
        epoch_bits: Width of epochs.
    """

    num_channels: int = 4
    packet_bytes: int = 4096
    staging_bytes: int = 524288
    epoch_bits: int = 32

    def layout(self, world_size: int) -> dict[str, int]:
        """The fields of KcclLayout."""
        return layout(world_size, self.num_channels, self.packet_bytes, self.staging_bytes)


@dataclass(frozen=True)
class DeviceComm:
    """A `kccl::DeviceComm` for kernels' arguments, from `comm.device_comm()`.

    Attributes:
        rank, world_size: The communicator's.
        data: The struct's bytes.
    """

    rank: int
    world_size: int
    data: bytes = field(repr=False)


def device_comm(
    settings: Settings,
    *,
    rank: int,
    addresses: tuple[int, ...],
    state: Any,
    channels: Any,
    polls_per_check: int,
) -> Any:
    """A KcclDeviceComm.

    Args:
        settings: The communicator's.
        rank: Who gets it.
        addresses: Of every rank's window, in rank order.
        state: The rank's KcclState.
        channels: The rank's KcclChannelState, one a channel.
        polls_per_check: Polls between two looks at the clock.
    """
    comm = ffi.new("KcclDeviceComm *")
    comm.abi_version = abi.ABI_VERSION
    comm.rank = rank
    comm.world_size = len(addresses)
    comm.num_channels = settings.num_channels
    comm.epoch_step = 1 << (32 - settings.epoch_bits)
    comm.polls_per_check = polls_per_check
    comm.state = int(ffi.cast("uintptr_t", state))
    comm.channels = int(ffi.cast("uintptr_t", channels))
    for peer, address in enumerate(addresses):
        comm.window[peer] = address
    for name, value in settings.layout(len(addresses)).items():
        setattr(comm.layout, name, value)
    return comm


def fill_call(
    call: Any, comm: Any, kernel: str, dtype: str = "float32", op: str = "sum", **fields: int
) -> None:
    """Fills a KcclCall from names; `fields` are its other fields."""
    call.comm = comm[0]
    call.kernel = abi.KERNELS[kernel]
    call.dtype = abi.DTYPES[dtype]
    call.op = abi.OPS[op]
    for name, value in fields.items():
        setattr(call, name, value)


class Backend:
    """One rank's memory and calls.

    Attributes:
        name: "host", "sim" or "cuda".
        state: The rank's KcclState.
        can_attach: Every rank's process may read every other's memory.
        has_streams: Calls are enqueued on a stream and return before they have run.
    """

    name: str
    can_attach = False
    has_streams = False
    state: Any

    def __init__(
        self,
        mesh: Mesh,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
        polls_per_check: int = 1,
    ) -> None:
        """Allocates the library's own window. Collective.

        Args:
            mesh: The ranks.
            settings: Sizes; the same on all ranks.
            shares_cores: There are more ranks than cores.
            are_threads: The ranks are threads of this process.
            timeout: Seconds to wait for the other ranks here.
            polls_per_check: Polls between two looks at the clock.
        """
        self._context = ffi.new("KcclHostContext *")
        for rank in range(abi.MAX_WORLD_SIZE):
            self._context.pidfd[rank] = mesh.pidfds.get(rank, -1)
        self._context.shares_cores = shares_cores
        self._context.holds_gil = not are_threads
        self.state = ffi.new("KcclState *")
        self.state.idle_context = int(ffi.cast("uintptr_t", self._context))
        self._channels = ffi.new("KcclChannelState[]", settings.num_channels)
        num_bytes = settings.layout(mesh.world_size)["window_bytes"]
        self._window = self._open_window(mesh, num_bytes, "start-up", timeout)
        self._comm = device_comm(
            settings,
            rank=mesh.rank,
            addresses=self._window.addresses,
            state=self.state,
            channels=self._channels,
            polls_per_check=polls_per_check,
        )
        self._arm()

    @classmethod
    def settings(cls, epoch_bits: int) -> Settings:
        """The sizes that suit this backend."""
        return Settings(epoch_bits=epoch_bits)

    def _open_window(self, mesh: Mesh, nbytes: int, what: str, timeout: float) -> Window:
        return Window(mesh, nbytes, what, timeout)

    def view(self, array: Any, name: str, *, writable: bool) -> ArrayView:
        """A caller's array, where this backend's calls can use it; see arrays.view."""
        return arrays.view(array, name, writable=writable)

    def array(self, window: Window, shape: tuple[int, ...], dtype: Any) -> Any:
        """This rank's part of a window as an array."""
        import numpy as np

        count = math.prod(shape)
        return np.frombuffer(window.local, dtypes.to_numpy(dtype), count).reshape(shape)

    def stream(self, given: Any, view: ArrayView | None) -> int:
        """The stream for a call: what the caller gave, else that of its array's library."""
        if given is not None:
            raise InvalidArgument(f"stream is {given!r}, must be None: host memory has no streams")
        return 0

    def place(self, handle: Any, stream: int) -> None:
        """Says on which stream the next run of a call goes."""

    def op(self, kernel: str, *, dtype: str = "float32", op: str = "sum", **fields: int) -> Any:
        """A KcclHostOp for a kernel by name; `fields` are KcclCall's.

        The caller keeps it for as long as its address is in use.
        """
        raise NotImplementedError

    def launch(
        self,
        kernel: Any,
        data: bytes,
        *,
        grid: int,
        block: int,
        shared_bytes: int,
        stream: int = 0,
    ) -> None:
        """Runs a module.Kernel to its end, or enqueues it; `data` are its arguments."""
        raise NotImplementedError

    def device_comm(self) -> DeviceComm:
        """What kernels take to talk to their peers."""
        data = bytes(ffi.buffer(self._comm))
        return DeviceComm(self._comm.rank, self._comm.world_size, data)

    def allocate(self, mesh: Mesh, nbytes: int, timeout: float) -> Window:
        """A window for the caller. Collective."""
        return self._open_window(mesh, nbytes, "window", timeout)

    def failure(self) -> Error | None:
        """What is wrong with the machine itself, whatever the state says; None for nothing."""
        return None

    def abort(self) -> None:
        """Fails this rank and whatever its peers wait for, now or later."""
        record = ffi.new("KcclRecord *")
        record.status = lib.kKcclAborted
        record.rank = record.peer = self._comm.rank
        lib.kccl_host_abort(self._comm, record)

    def leave(self) -> None:
        """Tells the peers that this rank makes no more calls."""
        lib.kccl_host_leave(self._comm)

    def clear(self) -> None:
        """Forgets every call, signal and failure of this rank. All ranks are between calls."""
        self._window.clear()
        self._arm()
        state = self.state
        fresh = ffi.new("KcclState *")
        for kept in ("limit_ns", "first_limit_ns", "idle_context"):
            setattr(fresh, kept, getattr(state, kept))
        ffi.memmove(state, fresh, ffi.sizeof("KcclState"))
        ffi.memmove(self._channels, bytes(ffi.sizeof(self._channels)), ffi.sizeof(self._channels))

    def _arm(self) -> None:
        """Writes what sentinel slots, the last region of the window, hold before the first call."""
        begin = self._comm.layout.sentinel
        self._window.local[begin:] = b"\xff" * (self._window.nbytes - begin)
