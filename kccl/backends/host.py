"""The host backend: ranks are processes or threads of one machine, windows are memfd segments."""

import json
import os
from dataclasses import dataclass
from typing import Any

from .. import abi
from ..abi import ffi, lib
from ..memory import Window, layout
from ..mesh import Mesh

# Polls between two looks at the clock: some 5 us when every rank has a core. A rank that shares its
# core yields it soon, because what it waits for may be waiting for that core.
_POLLS_OWN_CORE = 400
_POLLS_SHARED_CORE = 1


@dataclass(frozen=True)
class Settings:
    """What all ranks of a communicator must agree on.

    Attributes:
        num_channels: Independent streams of calls.
        packet_bytes: Payload bytes of one ll16 slot.
        staging_bytes: Bytes of one staging slot.
        epoch_bits: Width of epochs.
    """

    num_channels: int = 4
    packet_bytes: int = 4096
    staging_bytes: int = 524288
    epoch_bits: int = 32


class HostBackend:
    """One rank's memory and calls.

    Attributes:
        name: "host".
        state: The rank's KcclState.
        can_attach: Every rank's process may read every other's memory.
    """

    name = "host"

    def __init__(
        self,
        mesh: Mesh,
        settings: Settings,
        *,
        shares_cores: bool,
        are_threads: bool,
        timeout: float,
    ) -> None:
        """Allocates the library's own window. Collective.

        Args:
            mesh: The ranks.
            settings: Sizes; the same on all ranks.
            shares_cores: There are more ranks than cores.
            are_threads: The ranks are threads of this process.
            timeout: Seconds to wait for the other ranks here.
        """
        fields = layout(
            mesh.world_size, settings.num_channels, settings.packet_bytes, settings.staging_bytes
        )
        self._window = Window(mesh, fields["window_bytes"], "start-up", timeout)
        self._context = ffi.new("KcclHostContext *")
        for rank in range(abi.MAX_WORLD_SIZE):
            self._context.pidfd[rank] = mesh.pidfds.get(rank, -1)
        self._context.shares_cores = shares_cores
        self._context.holds_gil = not are_threads
        self.state = ffi.new("KcclState *")
        self.state.idle_context = int(ffi.cast("uintptr_t", self._context))
        self._comm = ffi.new("KcclDeviceComm *")
        self._comm.abi_version = abi.ABI_VERSION
        self._comm.rank = mesh.rank
        self._comm.world_size = mesh.world_size
        self._comm.num_channels = settings.num_channels
        self._comm.epoch_step = 1 << (32 - settings.epoch_bits)
        self._comm.polls_per_check = _POLLS_SHARED_CORE if shares_cores else _POLLS_OWN_CORE
        self._comm.state = int(ffi.cast("uintptr_t", self.state))
        for rank, address in enumerate(self._window.addresses):
            self._comm.window[rank] = address
        for name, value in fields.items():
            setattr(self._comm.layout, name, value)

        self.can_attach = self._try_to_attach(mesh, timeout)

    def _try_to_attach(self, mesh: Mesh, timeout: float) -> bool:
        """Whether every rank can read every other's memory. Collective.

        Each reads a word of each, because permission depends on the pair, and process ids mean
        something else in another container.
        """
        token = ffi.new("uint64_t *", int.from_bytes(os.urandom(8), "little"))
        mine = {"pid": os.getpid(), "address": int(ffi.cast("uintptr_t", token)), "token": token[0]}
        replies = mesh.allgather(json.dumps(mine).encode(), "start-up", timeout)
        word = ffi.new("uint64_t *")
        is_able = True
        for rank, reply in enumerate(replies):
            theirs = json.loads(reply)
            self._context.pid[rank] = theirs["pid"]
            error = lib.kccl_host_read_peer(
                self.state.idle_context, rank, word, theirs["address"], ffi.sizeof("uint64_t")
            )
            is_able = is_able and error == 0 and word[0] == theirs["token"]
        return all(
            reply == b"1"
            for reply in mesh.allgather(b"01"[is_able : is_able + 1], "start-up", timeout)
        )

    def op(self, kernel: str, *, dtype: str = "float32", op: str = "sum", **fields: int) -> Any:
        """A KcclHostOp for a kernel by name; `fields` are KcclCall's.

        The caller keeps it for as long as its address is in use.
        """
        handle = ffi.new("KcclHostOp *")
        call = handle.call
        call.comm = self._comm[0]
        call.kernel = abi.KERNELS[kernel]
        call.dtype = abi.DTYPES[dtype]
        call.op = abi.OPS[op]
        for name, value in fields.items():
            setattr(call, name, value)
        if lib.kccl_host_bind(handle) != 0:
            raise AssertionError(f"no kernel {kernel} for {dtype} {op}: the planner let it pass")
        return handle

    def allocate(self, mesh: Mesh, nbytes: int, timeout: float) -> Window:
        """A window for the caller. Collective."""
        return Window(mesh, nbytes, "window", timeout)

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
        state = self.state
        fresh = ffi.new("KcclState *")
        for kept in ("limit_ns", "first_limit_ns", "idle_context"):
            setattr(fresh, kept, getattr(state, kept))
        ffi.memmove(state, fresh, ffi.sizeof("KcclState"))
