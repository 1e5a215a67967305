"""A rank's messages on the host: csrc/host/messages.h sends and receives them."""

import weakref
from collections.abc import Sequence
from typing import Any

from ..base import abi
from ..base.abi import ffi, lib
from ..plan.steps import Message
from .routes import Routes


def messages_of(parts: Sequence[Message], kernel: str, channel: int) -> tuple[Any, Any]:
    """Returns an array of KcclMessage for parts of a call, and one of where their bytes begin."""
    tag = lib.kccl_host_tag_of_parts(channel, abi.KERNELS[kernel])
    messages = [
        {"peer": each.peer, "receives": each.receives, "num_bytes": each.num_bytes, "tag": tag}
        for each in parts
    ]
    offsets = [each.offset for each in parts]
    return ffi.new("KcclMessage[]", messages), ffi.new("uint64_t[]", offsets)


class Messages:
    """The messages of one rank that are under way, or that have arrived before their receive."""

    def __init__(
        self, context: Any, comm: Any, *, may_attach: bool = False, routes: Routes | None = None
    ) -> None:
        """
        Args:
            context: The rank's KcclHostContext, which gets the address of the messages.
            comm: The KcclDeviceComm of the communicator's own calls.
            may_attach: True if every rank's process may read every other's memory.
            routes: The rank's routes to its peers. None if the peers are the ranks of `comm`.
        """
        self._context = context
        self._comm = comm
        self._may_attach = may_attach
        self._routes = routes
        self._open()

    def _open(self) -> None:
        if self._routes is None:
            handle = lib.kccl_host_open_messages(self._comm, self._may_attach)
        else:
            handle = self._routes.open_messages(self._comm)
        if handle == 0:
            raise MemoryError("no memory for the messages of a communicator")
        self._context.messages = handle
        self._close = weakref.finalize(self, lib.kccl_host_close_messages, handle)
        self._close.atexit = False

    def clear(self) -> None:
        """Forgets all messages. Called while no call of this rank is under way."""
        self._close()
        if self._routes is not None:
            self._routes.clear()
        self._open()
