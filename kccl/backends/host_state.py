"""A rank's state in host memory, on the host as on the simulated machine."""

import select
from typing import Any

from ..base import abi
from ..base.abi import ffi, lib
from ..ranks.mesh import Mesh


def new_context(mesh: Mesh, *, shares_cores: bool, are_threads: bool) -> Any:
    """The KcclHostContext of a rank; see Opener for the arguments."""
    context = ffi.new("KcclHostContext *")
    for rank in range(abi.MAX_WORLD_SIZE):
        context.pidfd[rank] = mesh.pidfds.get(rank, -1)
    context.watches_streams = mesh.end_event != select.POLLIN
    context.shares_cores = shares_cores
    context.holds_gil = not are_threads
    return context


def new_state(context: Any) -> Any:
    """A rank's KcclState, which refers to its KcclHostContext: the caller keeps both."""
    state = ffi.new("KcclState *")
    state.idle_context = int(ffi.cast("uintptr_t", context))
    return state


def clear_state(state: Any) -> None:
    """Makes a KcclState as it was before the first call, but for the limits."""
    fresh = ffi.new("KcclState *")
    for kept in ("limit_ns", "first_limit_ns", "idle_context"):
        setattr(fresh, kept, getattr(state, kept))
    ffi.memmove(state, fresh, ffi.sizeof("KcclState"))


def abort(comm: Any) -> None:
    """See Backend.abort(); `comm` is the KcclDeviceComm of the rank's own calls."""
    record = ffi.new("KcclRecord *")
    record.status = lib.kKcclAborted
    record.rank = record.peer = comm.rank
    lib.kccl_host_abort(comm, record)
