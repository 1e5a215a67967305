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
    context.watches_sockets = mesh.end_event != select.POLLIN
    context.shares_cores = shares_cores
    context.holds_gil = not are_threads
    return context


def new_state(context: Any) -> Any:
    """Returns a rank's KcclState. It refers to the context, so the caller keeps both alive."""
    state = ffi.new("KcclState *")
    state.idle_context = int(ffi.cast("uintptr_t", context))
    return state


def clear_state(state: Any) -> None:
    """Resets a KcclState to what it was before the first call, except the timeouts."""
    fresh = ffi.new("KcclState *")
    for kept in ("limit_ns", "first_limit_ns", "idle_context"):
        setattr(fresh, kept, getattr(state, kept))
    ffi.memmove(state, fresh, ffi.sizeof("KcclState"))


def leave_when_collected(backend: object, scratches: Scratches, *keep: Any) -> None:
    """Makes a backend that is dropped without leave() tell its peers, when it is garbage-collected.

    Args:
        backend: The backend.
        scratches: Its scratches. They stay until the peers are told.
        keep: Objects to which the scratches' KcclDeviceComm refers: the KcclState and the
            KcclHostContext.
    """
    weakref.finalize(backend, _leave, scratches, os.getpid(), *keep).atexit = False


def _leave(scratches: Scratches, pid: int, *_: Any) -> None:
    # A fork of the process is not the rank, so it must not tell the peers that the rank leaves.
    if os.getpid() == pid and not scratches.are_dropped:
        lib.kccl_host_leave(scratches.comm)


def abort(comm: Any) -> None:
    """See Backend.abort(); `comm` is the KcclDeviceComm of the rank's own calls."""
    record = ffi.new("KcclRecord *")
    record.status = lib.kKcclAborted
    record.rank = record.peer = comm.rank
    lib.kccl_host_abort(comm, record)
