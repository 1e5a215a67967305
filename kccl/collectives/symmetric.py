"""window, empty, device_comm: memory that all ranks map."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

from ..backends.device_comm import DeviceComm
from ..base import arguments, dtypes
from ..ranks import windows
from ..ranks.agreement import agree_on_arguments
from .context import Context
from .one_sided import Get, Put


def _close_window(
    name: str,
    its_context: "ref[Context]",
    its_calls: "Sequence[ref[Put] | ref[Get]]",
    window: windows.Window,
) -> None:
    """Closes a window; see Window.close().

    If the communicator has been garbage-collected or closed, the ranks need not agree.

    Args:
        name: A text that is the same on all ranks if they close the same window.
        its_context, its_calls: The Context of the window's communicator, and its put and get.
        window: The window.
    """
    context = its_context()
    if context is not None and not context.has_left():
        with context.out_of_band("window.close") as limit_s:
            context.backend.wait_for_calls("window.close()")
            # After this exchange no call of any rank uses the window any more.
            agree_on_arguments(context.mesh, {"window": name}, "window.close", limit_s)
    for its_call in its_calls:
        call = its_call()
        if call is not None:
            call.forget_window(window)
    window.free()


class Symmetric:
    """The calls of a communicator that allocate memory on all ranks, a part of Communicator."""

    context: Context
    get: Get
    put: Put
    _num_windows = 0

    def window(self, nbytes: int) -> windows.Window:
        """Allocates a window of `nbytes` bytes on every rank. Collective.

        put() and get() take it, and kernels take it as `kccl::Window`. Its close() frees it.

        Raises:
            InvalidArgument: The size is no positive integer, or differs between ranks.
            BackendError: The memory could not be allocated or mapped on some rank; the text has its
                number and the reason. Or it is more than this machine's available memory. Then no
                rank has the window, and the communicator stays usable.
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        with self.context.out_of_band("window") as limit_s:
            nbytes = arguments.integer("nbytes", nbytes)
            window = self.context.backend.allocate(nbytes, limit_s)
            self._num_windows += 1
            name = f"number {self._num_windows}, of {nbytes} bytes"
            # A window refers to its communicator weakly, so that dropping the communicator tells
            # its peers.
            context = ref(self.context)
            calls: list[ref[Put] | ref[Get]] = [ref(self.put), ref(self.get)]
            return window.closes_by(partial(_close_window, name, context, calls))

    def empty(self, shape: int | tuple[int, ...], dtype: Any = dtypes.float32) -> Any:
        """Allocates an array in a window of its own, filled with zeros. Collective.

        Args:
            shape: Shape of the array, the same on every rank.
            dtype: A KCCL or NumPy element type.

        Returns:
            On the host a NumPy array. On a GPU an array that other libraries can take, as in
            torch.from_dlpack(x).

        Raises:
            InvalidArgument: shape or dtype is wrong, or differs between ranks.
            BackendError, Timeout, PeerLost: As window().
        """
        with self.context.out_of_band("empty") as limit_s:
            kind = dtypes.of(dtype)
            shape = arguments.shape(shape)
            same = {"shape": str(shape), "dtype": kind.name}
            agree_on_arguments(self.context.mesh, same, "empty", limit_s)
            nbytes = max(math.prod(shape) * kind.itemsize, 1)
            window = self.context.backend.allocate(nbytes, limit_s)
        return self.context.backend.array(window, shape, kind)

    def device_comm(
        self, *, channels: int = 132, max_bytes: int = 65536, exchange_bytes: int = 262144
    ) -> DeviceComm:
        """Makes a `kccl::DeviceComm`, the argument by which your kernels reach peers. Collective.

        It has scratch of its own: 8 * world_size * channels * max_bytes + 16 * exchange_bytes bytes
        on every rank, until the communicator ends. So kernels with different DeviceComms may run at
        the same time. All arguments must be the same on all ranks.

        Args:
            channels: Largest number of coops (blocks or warps) that make calls.
            max_bytes: Largest message of one coop, in bytes.
            exchange_bytes: Most bytes of all slices in publish() and collect() together. Each slice
                counts as a multiple of 64 bytes.

        Raises:
            InvalidArgument: A size is out of range, or differs between ranks.
            BackendError: As window().
            Timeout, PeerLost: A rank did not arrive in time, or has left or died.
        """
        with self.context.out_of_band("device_comm") as limit_s:
            channels = arguments.between("channels", channels, 1, 2**20)
            max_bytes = arguments.between("max_bytes", max_bytes, 1, 2**31)
            exchange_bytes = arguments.between("exchange_bytes", exchange_bytes, 1, 2**31)
            backend = self.context.backend
            return backend.comm_for_kernels(channels, max_bytes, exchange_bytes, limit_s)
