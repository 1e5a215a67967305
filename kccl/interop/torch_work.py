"""What a call of a process group returns: PyTorch's handle on it."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import Error
from ..comm import Communicator


class Work(dist.Work):
    """A call that was made. On the host it has run; on a GPU it lies on a stream.

    `wait()` makes the current stream wait for the call, and the host only for a barrier. How long a
    call itself may wait for its peers is the group's time-out, so that wait's own is not needed.
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
        # Otherwise the caller waits at once, and there is nothing behind the call on its stream.
        # PyTorch before 2.8 does not say.
        if stream is not None and getattr(opts, "asyncOp", True):
            self._event = stream.record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Lets what the current stream does next come after the call.

        Raises:
            Timeout, PeerLost: As far as it is known: a call on a GPU may still be under way.
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

    def synchronize(self) -> None:
        """As wait()."""
        self.wait()

    def block_current_stream(self) -> None:
        """As wait()."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call has run."""
        last = self._event or self._stream
        return last is None or bool(last.query())

    def is_success(self) -> bool:
        """Whether the call has run, and nothing has failed on its communicator."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Error | None:
        """What is known to have failed on the communicator."""
        try:
            self._comm.check()
        except Error as error:
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """The tensors that the call writes."""
        return self._tensors

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """A future of the same tensors; on a GPU its wait() too is one of streams."""
        if self._stream is None:
            future = torch.futures.Future()
            future.set_result(self._tensors)
            return future
        future = torch.futures.Future(devices=[self._stream.device])
        # A future takes down where the current stream is when it gets its result.
        with torch.cuda.stream(self._stream):
            future.set_result(self._tensors)
        return future
