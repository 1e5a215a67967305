"""The handles that calls of a process group return: PyTorch's Work."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..base import clock
from ..base.errors import Error
from ..base.errors import Timeout as OfKccl
from ..comm import Communicator
from .torch_dynamo import untraced
from .torch_errors import Timeout, of_torch

_POLL_S = 0.0005  # between two polls of a call on a GPU, in wait() with a timeout


def limit_s(timeout: timedelta | None) -> float | None:
    """Returns the timeout of a wait() in seconds; None, for no timeout, if it is None or not
    positive, as in PyTorch.
    """
    return timeout.total_seconds() if timeout and timeout > timedelta() else None


def timed_out(seconds: float, what: str) -> OfKccl:
    """Returns the error for a wait() whose timeout has passed. The call itself may still end."""
    return Timeout(f"Operation timed out! wait() was given {seconds:.3g} s, and {what}", rank=-1)


class Handle(dist.Work):
    """What the handles of all calls have in common."""

    @untraced
    def synchronize(self) -> None:
        """Does what wait() does."""
        self.wait()

    @untraced
    def block_current_stream(self) -> None:
        """Does what wait() does."""
        self.wait()


class Work(Handle):
    """The handle of a call of a process group.

    A call on the host has ended when its handle exists. A call on a GPU is enqueued on a stream,
    and `wait()` makes the current stream wait for it. The host waits only for a barrier, or if
    `wait()` is given a timeout.

    PyTorch reuses the memory of a tensor, once nothing refers to it, for later work of the
    program's stream. So an asynchronous call on another stream keeps its tensors, until the
    program's stream waits for the call. If the handle is dropped before, the memory is reused when
    the call has run.
    """

    def __init__(
        self,
        comm: Communicator,
        tensors: list[torch.Tensor],
        *,
        stream: "torch.cuda.Stream | None" = None,
        caller: "torch.cuda.Stream | None" = None,
        inputs: Sequence[torch.Tensor] = (),
        is_async: bool = True,
        sequence: int = 0,
        blocks_host: bool = False,
        error: Error | None = None,
    ) -> None:
        """Records what wait() needs. Also records an event on the stream of an asynchronous call.

        Args:
            comm: The communicator that has made the call.
            tensors: The tensors that the call writes.
            stream: The stream on which it was enqueued; None on the host.
            caller: The program's stream, for which the call is made.
            inputs: The tensors that the call reads.
            is_async: Whether the call is asynchronous.
            sequence: The call's number in its group.
            blocks_host: Whether wait() blocks the host until the call has ended on the GPU.
            error: The error of the call if it has failed. wait() raises it.
        """
        super().__init__()
        self._comm = comm
        self._tensors = tensors
        self._stream = stream
        self._sequence = sequence
        self._blocks_host = blocks_host
        self._error = error
        self._caller = caller
        self._kept = [] if stream == caller else [*inputs, *tensors]
        self._event: torch.cuda.Event | None = None
        # Else no event is needed: the caller waits at once, before anything else is enqueued on the
        # stream.
        if stream is not None and is_async:
            self._event = stream.record_event()

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait for the call. With a timeout the host waits, too, at most
        that long.

        Raises:
            Timeout: The timeout has passed.
            Timeout, PeerLost: A call of the communicator is known to have failed. A call on a GPU
                may still fail later.
        """
        if self._stream is not None:
            # First, because a capture can only end if all its streams are joined.
            now = self._join(self._stream)
        error = self.exception()
        if error is not None:
            raise error
        if self._stream is not None:
            self._wait_on_host(now, limit_s(timeout))
            error = self.exception()
            if error is not None:
                raise error
        return True

    def _join(self, stream: "torch.cuda.Stream") -> "torch.cuda.Stream":
        """Makes the current stream wait for the call. Returns it."""
        now = torch.cuda.current_stream(stream.device)
        if self._event is not None:
            now.wait_event(self._event)
        elif now != stream:
            now.wait_stream(stream)
        if now == self._caller:
            self._kept = []
        return now

    def __del__(self) -> None:
        for x in self._kept:
            x.record_stream(self._stream)

    def _wait_on_host(self, now: "torch.cuda.Stream", seconds: float | None) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        if seconds is not None:
            deadline = clock.now() + seconds
            while not self.is_completed():
                if clock.now() > deadline:
                    raise timed_out(seconds, "the call has not ended on the GPU")
                time.sleep(_POLL_S)
        if self._blocks_host:
            now.synchronize()

    @untraced
    def is_completed(self) -> bool:
        """Tells whether the call has run, or has failed."""
        last = self._event or self._stream
        return self._error is not None or last is None or bool(last.query())

    @untraced
    def is_success(self) -> bool:
        """Tells whether the call has run and no call on its communicator has failed."""
        return self.is_completed() and self.exception() is None

    @untraced
    def exception(self) -> Error | None:
        """Returns the error of this call, or of the communicator; None if none is known."""
        if self._error is not None:
            return self._error
        try:
            self._comm.check()
        except Error as error:
            return of_torch(error)
        return None

    @untraced
    def result(self) -> list[torch.Tensor]:
        """Returns the tensors that the call writes."""
        return self._tensors

    @untraced
    def _get_sequence_number(self) -> int:
        """Returns the number of the call in its group."""
        return self._sequence

    @untraced
    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """Returns a future of the tensors, or of the call's error. On a GPU the future's wait()
        makes the current stream wait for the call.
        """
        if self._stream is None or self._error is not None:
            future = torch.futures.Future()
            if self._error is None:
                future.set_result(self._tensors)
            else:
                future.set_exception(self._error)
            return future
        future = torch.futures.Future(devices=[self._stream.device])
        # set_result() records an event on the current stream.
        with torch.cuda.stream(self._stream):
            future.set_result(self._tensors)
        return future


class CoalescedWork(Handle):
    """The handle of several calls that were coalesced. It is completed when all of them are."""

    def __init__(self, works: Sequence[Any]) -> None:
        """Keeps the calls.

        Args:
            works: The Work of each call; at least one.
        """
        super().__init__()
        self._works = works

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Calls wait() of each call's Work, in their order, each with the whole timeout.

        Raises:
            Timeout, PeerLost: The error of the first call that has failed.
        """
        for work in self._works:
            # Gloo's own handles do not take None.
            work.wait(timeout or timedelta())
        return True

    @untraced
    def is_completed(self) -> bool:
        """Tells whether each call has run, or has failed."""
        return all([work.is_completed() for work in self._works])

    @untraced
    def is_success(self) -> bool:
        """Tells whether all calls have run, and none has failed."""
        return all([work.is_success() for work in self._works])

    @untraced
    def exception(self) -> Error | None:
        """Returns the first error; None if none is known."""
        return next((error for work in self._works if (error := work.exception())), None)

    @untraced
    def result(self) -> list[torch.Tensor]:
        """Returns the tensors of all calls, in the order of the calls."""
        return [tensor for work in self._works for tensor in work.result()]

    @untraced
    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """Returns a future of the tensors of all calls, or of the first error."""
        every = torch.futures.collect_all([work.get_future() for work in self._works])
        return every.then(lambda done: [x for each in done.value() for x in each.value()])
