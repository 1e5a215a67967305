"""What one rank has on every backend in host memory: a state, a window, calls made ready."""

import math
import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..base import abi, arrays, dtypes
from ..base.abi import ffi, lib
from ..base.arrays import ArrayView
from ..base.errors import Error, InvalidArgument
from ..plan.specs import BY_NAME
from ..ranks.mesh import Mesh
from ..ranks.windows import Window, layout


@dataclass(frozen=True)
class Settings:
    """What all ranks of a communicator must agree on.

    Attributes:
        num_channels: Independent streams of calls.
        blocks_per_channel: Most blocks of one call.
        packet_bytes: Payload bytes of one ll16 or sentinel slot.
        staging_bytes: Bytes of one staging slot.
        exchange_bytes: Payload bytes of all slices of an exchange of the grid.
        epoch_bits: Width of epochs.
    """

    num_channels: int = 4
    blocks_per_channel: int = 1
    packet_bytes: int = 4096
    staging_bytes: int = 524288
    exchange_bytes: int = 4096
    epoch_bits: int = 32

    @property
    def scratch_channels(self) -> int:
        """Channels that the scratch has: one a block of each call."""
        return self.num_channels * self.blocks_per_channel

    def layout(self, world_size: int) -> dict[str, int]:
        """The fields of KcclLayout."""
        sizes = self.packet_bytes, self.staging_bytes, self.exchange_bytes
        return layout(world_size, self.scratch_channels, *sizes)


@dataclass(frozen=True)
class DeviceComm:
    """A `kccl::DeviceComm` for kernels' arguments, from `comm.device_comm()`.

    Attributes:
        rank, world_size: The communicator's.
        channels: How many coops may make calls at the same time.
        max_bytes: Of one coop's call.
        data: The struct's bytes.
    """

    rank: int
    world_size: int
    channels: int
    max_bytes: int
    data: bytes = field(repr=False)


@dataclass(frozen=True)
class Scratch:
    """Memory for the calls of one DeviceComm.

    Attributes:
        window: Where peers write.
        channels: The rank's KcclChannelState, one a scratch channel: an array or gpu_memory.Memory.
        sentinel: Where in the window the region begins that is armed before the first call.
    """

    window: Window
    channels: Any
    sentinel: int


def make_comm(
    settings: Settings,
    *,
    rank: int,
    addresses: tuple[int, ...],
    scratch: tuple[int, ...],
    state: Any,
    channels: Any,
    polls_per_check: int,
) -> Any:
    """A KcclDeviceComm; csrc/include/kccl/device_comm.h fills it.

    Args:
        settings: The communicator's, which have been checked by Settings.layout().
        rank: Who gets it.
        addresses, scratch: Of every rank's window and scratch, in rank order.
        state: The rank's KcclState.
        channels: The rank's KcclChannelState, one a scratch channel.
        polls_per_check: Polls between two looks at the clock.
    """
    comm = ffi.new("KcclDeviceComm *")
    sizes = ffi.new("KcclSizes *", asdict(settings))
    state, channels = (int(ffi.cast("uintptr_t", each)) for each in (state, channels))
    own = rank, len(addresses), sizes, addresses, scratch, state, channels
    lib.kccl_host_make_comm(comm, *own, mmap.PAGESIZE, polls_per_check)
    return comm


def fill_op(
    handle: Any, comm: Any, kernel: str, dtype: str = "float32", op: str = "sum", **fields: int
) -> None:
    """Fills a KcclHostOp from names, but for its function; `fields` are KcclCall's other fields."""
    fill_call(handle.call, comm, kernel, dtype, op, **fields)
    handle.bytes_per_count = BY_NAME[kernel].message_bytes(1, dtype, comm.world_size)


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
        caveat: What a survivor must know when a peer is lost; "" for nothing.
    """

    name: str
    caveat = ""
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
        self._settings = settings
        self._context = ffi.new("KcclHostContext *")
        for rank in range(abi.MAX_WORLD_SIZE):
            self._context.pidfd[rank] = mesh.pidfds.get(rank, -1)
        self._context.shares_cores = shares_cores
        self._context.holds_gil = not are_threads
        self.state = ffi.new("KcclState *")
        self.state.idle_context = int(ffi.cast("uintptr_t", self._context))
        self._polls_per_check = polls_per_check
        self._start(mesh, settings, timeout)

    def _start(self, mesh: Mesh, settings: Settings, timeout: float) -> None:
        """Allocates the window of the library's own calls."""
        self._mesh = mesh
        self._scratches: list[Scratch] = []
        own = self._make_scratch(settings, "start-up", timeout)
        self._window = own.window
        self._comm = self._device_comm(settings, own)

    @classmethod
    def settings(cls, epoch_bits: int) -> Settings:
        """The sizes that suit this backend."""
        return Settings(epoch_bits=epoch_bits)

    def _make_scratch(self, settings: Settings, what: str, timeout: float) -> Scratch:
        """Collective. Peers may write when all ranks have been heard of after it."""
        layout = settings.layout(self._mesh.world_size)
        window = self._open_window(self._mesh, layout["scratch_bytes"], what, timeout, layout)
        channels = self._make_channels(settings.scratch_channels)
        scratch = Scratch(window, channels, layout["sentinel"])
        self._arm(scratch)
        self._scratches.append(scratch)
        return scratch

    def _make_channels(self, count: int) -> Any:
        return ffi.new("KcclChannelState[]", count)

    def _clear_channels(self, channels: Any) -> None:
        ffi.memmove(channels, bytes(ffi.sizeof(channels)), ffi.sizeof(channels))

    def _clear_scratches(self) -> None:
        for scratch in self._scratches:
            scratch.window.clear()
            self._arm(scratch)
            self._clear_channels(scratch.channels)

    def _addresses_of(self, scratch: Scratch) -> tuple[Any, Any]:
        """What of the KcclState and of the KcclChannelState goes into a KcclDeviceComm."""
        return self.state, scratch.channels

    def _device_comm(self, settings: Settings, scratch: Scratch) -> Any:
        state, channels = self._addresses_of(scratch)
        return make_comm(
            settings,
            rank=self._mesh.rank,
            addresses=self._window.addresses,
            scratch=scratch.window.addresses,
            state=state,
            channels=channels,
            polls_per_check=self._polls_per_check,
        )

    def _open_window(
        self,
        mesh: Mesh,
        nbytes: int,
        what: str,
        timeout: float,
        layout: Mapping[str, int] | None = None,
    ) -> Window:
        """A window of any content, or one with the regions of `layout`."""
        return Window(mesh, nbytes, what, timeout)

    def view(self, array: Any, name: str, *, writable: bool) -> ArrayView:
        """A caller's array, where this backend's calls can use it; see arrays.view."""
        return arrays.view(array, name, writable=writable)

    def array(self, window: Window, shape: tuple[int, ...], dtype: Any) -> Any:
        """This rank's part of a window as an array."""
        import numpy as np

        count = math.prod(shape)
        return np.frombuffer(window.local, dtypes.to_numpy(dtype), count).reshape(shape)

    def like(self, array: Any, view: ArrayView, shape: tuple[int, ...]) -> Any:
        """A new array for a call's result, of the type of a caller's, of which `view` was taken."""
        import numpy as np

        return np.empty(shape, dtypes.to_numpy(view.dtype))

    def stream(self, given: Any, view: ArrayView | None) -> int:
        """The stream for a call: what the caller gave, else that of its array's library."""
        if given is not None:
            raise InvalidArgument(f"stream is {given!r}, must be None: host memory has no streams")
        return 0

    def follow(self, given: Any, view: ArrayView | None) -> int | Callable[[], int]:
        """The stream of a prepared call: a number, or what says it before each run."""
        raise NotImplementedError

    def intervals_us(self, stream: int, parts: Sequence[Callable[[], None]]) -> list[float]:
        """Microseconds a stream takes for what each part enqueues; waits for its end."""
        raise NotImplementedError

    def place(self, handle: Any, stream: int) -> None:
        """Says on which stream the next run of a call goes."""

    def record(self, handle: Any) -> Any:
        """Lets a call that is made many times take the host less time; keep what it returns."""

    def op(
        self,
        kernel: str,
        shape: tuple[int, int] = (0, 0),
        *,
        dtype: str = "float32",
        op: str = "sum",
        **fields: int,
    ) -> Any:
        """A KcclHostOp for a kernel by name; `fields` are KcclCall's.

        The caller keeps it for as long as its address is in use.

        Args:
            kernel: Its name.
            shape: Most blocks, and threads of each while there are blocks for them, as
                check_shape() lets them pass; 0 for what suits the backend.
            dtype, op, fields: What is called.
        """
        raise NotImplementedError

    def check_shape(self, blocks: Any, threads: Any) -> None:
        """Checks what a caller gave as a call's shape; see op().

        Raises:
            InvalidArgument: There is no such shape here.
        """
        raise InvalidArgument(
            f"blocks is {blocks!r} and threads {threads!r}, must be 0: they are for the cuda "
            f"backend, this one is {self.name}"
        )

    def shape_of(self, handle: Any) -> tuple[int, int]:
        """Blocks of a call that op() made, and threads of each."""
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

    def device_comm(
        self, channels: int, max_bytes: int, exchange_bytes: int, timeout: float
    ) -> DeviceComm:
        """What kernels take to talk to their peers. Collective; see _make_scratch()."""
        settings = replace(
            self._settings,
            num_channels=channels,
            blocks_per_channel=1,
            packet_bytes=-(-max_bytes // abi.PACKET_UNIT) * abi.PACKET_UNIT,
            staging_bytes=abi.LEAST_STAGING_BYTES,
            exchange_bytes=-(-exchange_bytes // abi.LINE_BYTES) * abi.LINE_BYTES,
        )
        comm = self._device_comm(settings, self._make_scratch(settings, "device_comm", timeout))
        data = bytes(ffi.buffer(comm))
        # Nobody writes before all are ready.
        self._mesh.allgather(b"", "device_comm", timeout)
        return DeviceComm(comm.rank, comm.world_size, channels, max_bytes, data)

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
        self._clear_scratches()
        state = self.state
        fresh = ffi.new("KcclState *")
        for kept in ("limit_ns", "first_limit_ns", "idle_context"):
            setattr(fresh, kept, getattr(state, kept))
        ffi.memmove(state, fresh, ffi.sizeof("KcclState"))

    def _arm(self, scratch: Scratch) -> None:
        """Writes what sentinel slots, the last region, hold before the first call."""
        num_bytes = scratch.window.nbytes - scratch.sentinel
        scratch.window.local[scratch.sentinel :] = b"\xff" * num_bytes
