"""The handle that a call of a process group returns: PyTorch's Work."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import Error
from ..comm import Communicator
from .torch_dynamo import untraced


class Work(dist.Work):
    """A call of a process group. On the host it has run. On a GPU it is enqueued on a stream.

    `wait()` makes the current stream wait for the call. Only for a barrier the host waits, too. The
    `timeout` of `wait()` is ignored: the time-out of the group limits the call itself.
    """

    def __init__(
        self,
        comm: Communicator,
        tensors: list[torch.Tensor],
        stream: "torch.cuda.Stream | None",
        opts: Any,
        *,
        blocks_host: bool = False,
    ) -> None:
        super().__init__()
        self._comm = comm
        self._tensors = tensors
        self._stream = stream
        self._blocks_host = blocks_host
        self._event: torch.cuda.Event | None = None
        # With asyncOp False no event is needed: the caller waits at once, before anything else is
        # enqueued on the stream. PyTorch before 2.8 has no asyncOp.
        if stream is not None and getattr(opts, "asyncOp", True):
            self._event = stream.record_event()

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait for the call.

        Raises:
            Timeout, PeerLost: A call is known to have failed. A call on a GPU may still fail later.
        """
        if self._stream is not None:
            now = torch.cuda.current_stream(self._stream.device)
            if self._event is not None:
                now.wait_event(self._event)
            elif now != self._stream:
                now.wait_stream(self._stream)
            if self._blocks_host and not torch.cuda.is_current_stream_capturing():
                now.synchronize()
        self._comm.check()
        return True

    @untraced
    def synchronize(self) -> None:
        """Does what wait() does."""
        self.wait()

    @untraced
    def block_current_stream(self) -> None:
        """Does what wait() does."""
        self.wait()

    @untraced
    def is_completed(self) -> bool:
        """Whether the call has run."""
        last = self._event or self._stream
        return last is None or bool(last.query())

    @untraced
    def is_success(self) -> bool:
        """Whether the call has run and no call on its communicator has failed."""
        return self.is_completed() and self.exception() is None

    @untraced
    def exception(self) -> Error | None:
        """The error of a failed call on the communicator; None if none is known."""
        try:
            self._comm.check()
        except Error as error:
            return error
        return None

    @untraced
    def result(self) -> list[torch.Tensor]:
        """The tensors that the call writes."""
        return self._tensors

    @untraced
    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """A future of the same tensors. On a GPU its wait() makes the current stream wait."""
        if self._stream is None:
            future = torch.futures.Future()
            future.set_result(self._tensors)
            return future
        future = torch.futures.Future(devices=[self._stream.device])
        # set_result() records an event on the current stream.
        with torch.cuda.stream(self._stream):
            future.set_result(self._tensors)
        return future
