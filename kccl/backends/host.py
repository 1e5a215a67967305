"""The host backend: ranks are processes or threads of one machine, windows are memfd segments."""

import threading
from collections.abc import Sequence
from typing import Any

from ..base import arrays, strided
from ..base.abi import ffi, lib
from ..plan.specs import BY_NAME
from ..ranks.team import Connected
from ..ranks.windows import Window
from . import host_launch, host_memory, host_state, no_streams
from .attach import Probes
from .base import Backend
from .calls import fill_op
from .device_comm import DeviceComm
from .host_memory import HostMemory
from .messages import Messages
from .routes import MESSAGE_BYTES
from .scratch import Scratches
from .settings import Settings
from .temporaries import Temporaries

# Polls between two reads of the clock. With a core for every rank they take some 2 us. Ranks that
# share cores yield theirs after each poll, because a peer may need it.
_POLLS_OWN_CORE = 40
_POLLS_SHARED_CORE = 1


def polls_per_check(*, shares_cores: bool) -> int:
    """Returns the number of polls between two reads of the clock."""
    return _POLLS_SHARED_CORE if shares_cores else _POLLS_OWN_CORE


class HostBackend(Backend):
    """One rank's memory and calls on the host, for the ranks of one team.

    Attributes:
        dropping: Lock that abort() and drop_memory() hold, so that neither runs within the other.
    """

    name = "host"
    has_streams = False
    has_virtual_time = False
    caveat = ""

    view = staticmethod(arrays.view)
    array = staticmethod(host_memory.array)
    like = staticmethod(host_memory.like)
    copied = staticmethod(strided.on_host)
    stream = staticmethod(no_streams.stream)
    # Only backends with streams have these methods. Here they raise.
    stream_of_prepared = as_graph = intervals_us = shape_of = no_streams.not_here
    answers = is_captured = no_streams.not_here

    def __init__(
        self,
        mesh: Connected,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> None:
        """See Opener."""
        self.context = host_state.new_context(
            mesh, shares_cores=shares_cores, are_threads=are_threads
        )
        self.state = host_state.new_state(self.context)
        self._memory = HostMemory(mesh)
        self._temporaries = Temporaries(host_memory.anonymous)
        # abort() writes into the scratches, and any thread or signal handler may call it while
        # drop_memory() frees them.
        self.dropping = threading.RLock()
        self._scratches = Scratches(
            mesh,
            settings,
            self._memory,
            state=self.state,
            polls_per_check=polls_per_check(shares_cores=shares_cores),
            timeout=timeout,
        )
        self._scratches.comm.shares_arrays = are_threads
        self.can_attach = self._try_to_attach(mesh, timeout)
        self._messages = Messages(self.context, self._scratches.comm, may_attach=self.can_attach)
        host_state.leave_when_collected(self, self._scratches, self.state, self.context)

    @staticmethod
    def settings(epoch_bits: int) -> Settings:
        """See Opener."""
        return Settings(epoch_bits=epoch_bits, message_bytes=MESSAGE_BYTES)

    def _try_to_attach(self, mesh: Connected, timeout: float) -> bool:
        """Tells whether every rank can read every other's memory. Collective."""
        self._probes = probes = Probes(mesh, timeout)
        for rank, (pid, address) in enumerate(zip(probes.pids, probes.addresses, strict=True)):
            self.context.pid[rank], self.context.probe[rank] = pid, address
        return probes.are_readable

    @property
    def comm(self) -> Any:
        """Returns the KcclDeviceComm of the rank's own calls."""
        return self._scratches.comm

    @property
    def is_dropped(self) -> bool:
        """Tells whether drop_memory() was called."""
        return self._scratches.are_dropped

    def allocate(self, nbytes: int, timeout: float) -> Window:
        """See Backend."""
        return self._memory.window(nbytes, "window", timeout)

    def comm_for_kernels(
        self, channels: int, max_bytes: int, exchange_bytes: int, timeout: float
    ) -> DeviceComm:
        """See Backend."""
        return self._scratches.comm_for_kernels(channels, max_bytes, exchange_bytes, timeout)

    def temporary(self, nbytes: int, channel: int) -> int:
        """See Backend."""
        return self._temporaries.room(nbytes, channel)

    def set_stream(self, handle: Any, stream: int) -> None:
        """See Backend: a call here has no stream."""

    def call(
        self,
        kernel: str,
        shape: tuple[int, int] = (0, 0),
        *,
        dtype: str = "float32",
        op: str = "sum",
        **fields: int,
    ) -> Any:
        """See Backend."""
        handle = ffi.new("KcclHostOp *")
        fill_op(handle, self._scratches.comm, kernel, dtype, op, **fields)
        # Only calls of all ranks on a channel are compared with the peers' calls. One-sided calls
        # use no channel.
        handle.is_new = BY_NAME[kernel].is_collective
        if lib.kccl_host_bind(handle) != 0:
            raise AssertionError(f"no kernel {kernel} for {dtype} {op}: the planner let it pass")
        return handle

    def check_shape(self, blocks: Any, threads: Any) -> None:
        """See Backend: calls here have no shape."""
        raise no_streams.no_shape(self.name, blocks, threads)

    def load(self, kernel: Any) -> None:
        """See Backend: code is loaded when its module is made."""

    def launch(
        self,
        kernel: Any,
        data: bytes,
        *,
        grid: int,
        block: int,
        shared_bytes: int,
        stream: int,
        arrays: Sequence[tuple[int, int, int, Any]] = (),
    ) -> None:
        """See Backend."""
        host_launch.run(
            kernel.entry,
            data,
            grid=grid,
            shared_bytes=shared_bytes,
            context=self.context,
            abort=self.abort,
        )

    def failure(self) -> None:
        """See Backend. Returns None, because the state has every failure."""

    def simulated_waits(self) -> str | None:
        """See Backend."""
        return None

    def abort(self) -> None:
        """See Backend."""
        with self.dropping:
            if not self._scratches.are_dropped:
                host_state.abort(self._scratches.comm)

    def leave(self) -> None:
        """See Backend."""
        lib.kccl_host_leave(self._scratches.comm)

    def drop_memory(self) -> None:
        """See Backend."""
        with self.dropping:
            self._scratches.drop()
            self._temporaries.drop()

    def wait_for_calls(self, what: str) -> None:
        """See Backend: a call here returns when it has ended."""

    def clear(self) -> None:
        """See Backend."""
        self._scratches.clear()
        self._messages.clear()
        host_state.clear_state(self.state)
