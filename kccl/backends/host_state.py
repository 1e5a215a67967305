"""A rank's state in host memory, on the host as on the simulated machine."""

import os
import select
import weakref
from typing import Any

from ..base import abi
from ..base.abi import ffi, lib
from ..ranks.team import Connected
from .scratch import Scratches


def new_context(mesh: Connected, *, shares_cores: bool, are_threads: bool) -> Any:
    """Returns the KcclHostContext of a rank; see Opener for the arguments."""
    context = ffi.new("KcclHostContext *")
    for rank in range(abi.MAX_WORLD_SIZE):
        context.pidfd[rank] = mesh.pidfds.get(rank, -1)
    context.watches_streams = mesh.end_event != select.POLLIN
    context.shares_cores = shares_cores
    context.holds_gil = not are_threads
    return context


def new_state(context: Any) -> Any:
    """Returns a rank's KcclState, which refers to its KcclHostContext: the caller keeps both."""
    state = ffi.new("KcclState *")
    state.idle_context = int(ffi.cast("uintptr_t", context))
    return state


def clear_state(state: Any) -> None:
    """Makes a KcclState as it was before the first call, but for the limits."""
    fresh = ffi.new("KcclState *")
    for kept in ("limit_ns", "first_limit_ns", "idle_context"):
        setattr(fresh, kept, getattr(state, kept))
    ffi.memmove(state, fresh, ffi.sizeof("KcclState"))


def leave_when_collected(backend: object, scratches: Scratches, *keep: Any) -> None:
    """Sees to it that a backend which is dropped without leave() tells its peers.

    Args:
        backend: The backend.
        scratches: Its scratches. They stay until the peers are told.
        keep: What their KcclDeviceComm refers to: the KcclState and the KcclHostContext.
    """
    weakref.finalize(backend, _leave, scratches, os.getpid(), *keep).atexit = False


def _leave(scratches: Scratches, pid: int, *_: Any) -> None:
    # The process id is kept, because a fork of the process is not the rank.
    if os.getpid() == pid and not scratches.are_dropped:
        lib.kccl_host_leave(scratches.comm)


def abort(comm: Any) -> None:
    """See Backend.abort(); `comm` is the KcclDeviceComm of the rank's own calls."""
    record = ffi.new("KcclRecord *")
    record.status = lib.kKcclAborted
    record.rank = record.peer = comm.rank
    lib.kccl_host_abort(comm, record)
