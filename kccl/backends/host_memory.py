"""The memory of ranks in host memory, for the host and for the simulated machine."""

import math
import mmap
from collections.abc import Mapping
from typing import Any

from ..base import dtypes
from ..base.abi import ffi
from ..base.arrays import ArrayView
from ..ranks.team import Connected
from ..ranks.windows import HostWindow, Window, host_window


class HostChannels:
    """See scratch.Channels."""

    def __init__(self, count: int) -> None:
        self._states = ffi.new("KcclChannelState[]", count)
        self.address = int(ffi.cast("uintptr_t", self._states))

    def clear(self) -> None:
        """See scratch.Channels."""
        num_bytes = ffi.sizeof(self._states)
        ffi.memmove(self._states, bytes(num_bytes), num_bytes)


def anonymous(nbytes: int) -> tuple[int, mmap.mmap]:
    """Allocates `nbytes` bytes. Returns their address, and an object that keeps them mapped."""
    memory = mmap.mmap(-1, nbytes)
    return int(ffi.cast("uintptr_t", ffi.from_buffer(memory))), memory


def arm(window: Window, begin: int) -> None:
    """See scratch.Memory."""
    window.local[begin:] = b"\xff" * (window.nbytes - begin)


class HostMemory:
    """See scratch.Memory: memory that the ranks' processes share."""

    channels = HostChannels
    arm = staticmethod(arm)

    def __init__(self, mesh: Connected) -> None:
        self._mesh = mesh

    def window(
        self, nbytes: int, what: str, timeout: float, layout: Mapping[str, int] | None = None
    ) -> HostWindow:
        """See scratch.Memory."""
        return host_window(self._mesh, nbytes, what, timeout)


class _Part:
    """This rank's part of a window, as an object from which NumPy makes an array
    (__array_interface__). The array keeps this object alive, which keeps the window with all ranks'
    parts alive.
    """

    def __init__(self, window: Window) -> None:
        self._keep = window, window.local
        self.__array_interface__ = {
            "shape": (window.nbytes,),
            "typestr": "|u1",
            "data": (window.addresses[window.mesh.rank], False),
            "version": 3,
        }


def array(window: Window, shape: tuple[int, ...], dtype: Any) -> Any:
    """See Backend: a NumPy array."""
    import numpy as np

    kind = np.dtype(dtypes.to_numpy(dtype))
    count = math.prod(shape)
    return np.asarray(_Part(window))[: count * kind.itemsize].view(kind).reshape(shape)


def like(array: Any, view: ArrayView, shape: tuple[int, ...]) -> Any:
    """See Backend: a NumPy array."""
    import numpy as np

    is_moved = view.dtype.kind == "bytes" and isinstance(array, (np.ndarray, np.generic))
    return np.empty(shape, array.dtype if is_moved else dtypes.to_numpy(view.dtype))
