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
from . import torch_cuda
from .torch_dynamo import untraced
from .torch_errors import Timeout, of_torch
from .torch_streams import Place

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

    _error: BaseException | None = None  # of the call, once it is known
    _tensors: list[torch.Tensor]  # the tensors of the call, or those that it writes

    @untraced
    def synchronize(self) -> None:
        """Does what wait() does."""
        self.wait()

    @untraced
    def block_current_stream(self) -> None:
        """Does what wait() does."""
        self.wait()

    @untraced
    def is_success(self) -> bool:
        """Tells whether the call has ended, and has not failed as far as is known."""
        return bool(self.is_completed()) and self.exception() is None

    @untraced
    def exception(self) -> BaseException | None:
        """Returns the error of the call; None if none is known."""
        return self._error

    @untraced
    def result(self) -> list[torch.Tensor]:
        """Returns the tensors of the call, or those that it writes."""
        return self._tensors


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
        place: Place | None = None,
        inputs: Sequence[torch.Tensor] = (),
        *,
        sequence: int = 0,
        blocks_host: bool = False,
        error: Error | None = None,
    ) -> None:
        """Records what wait() needs.

        Args:
            comm: The communicator that has made the call.
            tensors: The tensors that the call writes.
            place: Where it was enqueued; None on the host, or if the call has failed.
            inputs: The tensors that the call reads.
            sequence: The call's number in its group.
            blocks_host: Whether wait() blocks the host until the call has ended on the GPU.
            error: The error of the call if it has failed. wait() raises it.
        """
        dist.Work.__init__(self)
        self._comm = comm
        self._tensors = tensors
        self._place = place
        self._sequence = sequence
        self._blocks_host = blocks_host
        self._error = error
        self._kept: list[torch.Tensor] = []
        if place is not None and place.stream is not place.caller:
            self._kept = [*tensors] if inputs is tensors else [*inputs, *tensors]

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Makes the current stream wait for the call. With a timeout the host waits, too, at most
        that long.

        Raises:
            Timeout: The timeout has passed.
            Timeout, PeerLost: A call of the communicator is known to have failed. A call on a GPU
                may still fail later.
        """
        place = self._place
        now = None
        if place is not None:
            # First, because a capture can only end if all its streams are joined.
            stream, caller, mark = place
            now = torch_cuda.current_stream(stream.device_index)
            if now is not stream:
                if mark is not None:
                    mark.event.wait(now)
                else:
                    # The caller waits at once, before anything else is enqueued on the stream.
                    now.wait_stream(stream)
            if now is caller:
                self._kept = []
        self._raise_error()
        if now is not None and (timeout or self._blocks_host):
            self._wait_on_host(now, limit_s(timeout))
            self._raise_error()
        return True

    def _raise_error(self) -> None:
        error = self.exception()
        if error is not None:
            raise error

    def __del__(self) -> None:
        if self._place is not None:
            for x in self._kept:
                x.record_stream(self._place.stream)

    def _wait_on_host(self, now: "torch.cuda.Stream", seconds: float | None) -> None:
        if torch_cuda.is_capturing(now):
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
        if self._error is not None or self._place is None:
            return True
        stream, mark = self._place.stream, self._place.mark
        return bool(stream.query() if mark is None else mark.event.query())

    @untraced
    def exception(self) -> BaseException | None:
        """Returns the error of this call, or of the communicator; None if none is known."""
        if self._error is not None:
            return self._error
        try:
            self._comm.check()
        except Error as error:
            return of_torch(error)
        return None

    @untraced
    def _get_sequence_number(self) -> int:
        """Returns the number of the call in its group."""
        return self._sequence

    @untraced
    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """Returns a future of the tensors, or of the call's error. On a GPU the future's wait()
        makes the current stream wait for the call.
        """
        if self._place is None or self._error is not None:
            future = torch.futures.Future()
            if self._error is None:
                future.set_result(self._tensors)
            else:
                future.set_exception(self._error)
            return future
        stream = self._place.stream
        # The base class, as PyTorch's own handles return: it makes a future without Python.
        future = torch._C.Future([stream.device])
        # set_result() records an event on the current stream.
        with torch_cuda.On(stream):
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
