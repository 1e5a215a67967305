"""What ranks have in host memory, on the host as on the simulated machine."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from ..base import abi, dtypes
from ..base.abi import ffi, lib
from ..base.arrays import ArrayView
from ..base.errors import InvalidArgument
from ..ranks.mesh import Mesh
from ..ranks.windows import Window

# ---- A rank's state ----------------------------------------------------------------------------


def new_context(mesh: Mesh, *, shares_cores: bool, are_threads: bool) -> Any:
    """The KcclHostContext of a rank; see Opener for the arguments."""
    context = ffi.new("KcclHostContext *")
    for rank in range(abi.MAX_WORLD_SIZE):
        context.pidfd[rank] = mesh.pidfds.get(rank, -1)
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


# ---- Windows and channels ----------------------------------------------------------------------


class HostChannels:
    """See scratch.Channels."""

    def __init__(self, count: int) -> None:
        self._states = ffi.new("KcclChannelState[]", count)
        self.address = int(ffi.cast("uintptr_t", self._states))

    def clear(self) -> None:
        """See scratch.Channels."""
        num_bytes = ffi.sizeof(self._states)
        ffi.memmove(self._states, bytes(num_bytes), num_bytes)


def arm(window: Window, begin: int) -> None:
    """See scratch.Memory."""
    window.local[begin:] = b"\xff" * (window.nbytes - begin)


class HostMemory:
    """See scratch.Memory: memory that the ranks' processes share."""

    channels = HostChannels
    arm = staticmethod(arm)

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def window(
        self, nbytes: int, what: str, timeout: float, layout: Mapping[str, int] | None = None
    ) -> Window:
        """See scratch.Memory."""
        return Window(self._mesh, nbytes, what, timeout)


# ---- Arrays, and streams, of which there are none ----------------------------------------------


def array(window: Window, shape: tuple[int, ...], dtype: Any) -> Any:
    """See Backend: a NumPy array."""
    import numpy as np

    count = math.prod(shape)
    return np.frombuffer(window.local, dtypes.to_numpy(dtype), count).reshape(shape)


def like(array: Any, view: ArrayView, shape: tuple[int, ...]) -> Any:
    """See Backend: a NumPy array."""
    import numpy as np

    return np.empty(shape, dtypes.to_numpy(view.dtype))


def stream(given: Any, view: ArrayView | None) -> int:
    """See Backend.

    Raises:
        InvalidArgument: The caller gave a stream.
    """
    if given is not None:
        raise InvalidArgument(f"stream is {given!r}, must be None: host memory has no streams")
    return 0


def no_shape(name: str, blocks: Any, threads: Any) -> InvalidArgument:
    """The error of Backend.check_shape() where calls have no shape."""
    return InvalidArgument(
        f"blocks is {blocks!r} and threads {threads!r}, must be 0: they are for the cuda "
        f"backend, this one is {name}"
    )


def not_here(*_: Any, **__: Any) -> NoReturn:
    """In place of methods that nobody calls on a backend like this one."""
    raise AssertionError("the caller has not looked at this backend's has_streams or name")
