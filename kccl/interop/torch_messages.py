"""Implements send and recv of a process group, and a thread that makes their progress.

A message makes progress only while its communicator is called. Meanwhile PyTorch's programs
compute, or wait in a collective. So messages have a communicator of their own, and a background
thread calls it while messages are under way.
"""

import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch

from ..base import clock
from ..base.errors import Error
from ..collectives.messages import Request
from ..comm import Communicator
from .torch_dynamo import untraced
from .torch_errors import of_torch
from .torch_moves import movable
from .torch_work import Handle, limit_s, timed_out

# The pause between two polls, of the thread and of a wait() that has waited longer than _LONG_S.
_PAUSE_S = 0.0001
_LONG_S = 0.01
# After a timeout, _fail() waits once more with this timeout, so that the communicator fails.
_LAST_WAIT_S = 0.001


@dataclass
class Call:
    """One send or receive.

    Attributes:
        tensor: The tensor to send, or to receive into.
        peer: The other rank in the group; None to receive from any rank.
        tag: The message's tag.
        receives: Whether this is a receive.
    """

    tensor: torch.Tensor
    peer: int | None
    tag: int
    receives: bool

    def on_host(self) -> torch.Tensor:
        """Returns the tensor if it is on the host, and else a host tensor to use in its place.

        To send, the host tensor is a copy; to receive, it is uninitialised.

        Raises:
            Error: A CUDA graph is being captured.
        """
        x = self.tensor.detach()
        if x.device.type == "cpu":
            return x
        if torch.cuda.is_current_stream_capturing():
            raise Error(
                "send and recv of tensors on a GPU go through the host's memory, so a CUDA graph "
                "cannot capture them: call them outside of the graph"
            )
        return torch.empty_like(x, device="cpu") if self.receives else x.cpu()


class MessageWork(Handle):
    """The handle of messages that were begun together. wait() blocks until all have ended."""

    def __init__(self, messages: "Messages", calls: list[Call]) -> None:
        super().__init__()
        self._messages = messages
        self._calls = calls
        self._tensors = [call.tensor for call in calls]
        self._requests: list[Request] = []
        # Receives of GPU tensors: (the host tensor, the GPU tensor, the stream at the call).
        self._landings: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self._is_settled = False
        self._settling = threading.RLock()
        self._futures: list[torch.futures.Future[list[torch.Tensor]]] = []

    # ---- Called by Messages ------------------------------------------------------------------

    def begin(self, comm: Communicator) -> None:
        """Begins all messages, receives first, so that data that arrives has its tensor already."""
        arrays = []
        for call in sorted(self._calls, key=lambda call: not call.receives):
            host = call.on_host()
            arrays.append((call, movable(host, "tensor")))
            if call.receives and host.device != call.tensor.device:
                stream = torch.cuda.current_stream(call.tensor.device)
                self._landings.append((host, call.tensor.detach(), stream))
        for call, array in arrays:
            if call.receives:
                request = comm.irecv(array, call.peer, call.tag)
            else:
                request = comm.isend(array, call.peer, call.tag)  # type: ignore[arg-type]
            self._requests.append(request)

    def look(self) -> bool:
        """Makes progress on these messages. Returns whether all are done, or one has failed."""
        try:
            return all([request.test() for request in self._requests])
        except Error as error:
            self._error = of_torch(error)
            return True

    def finish(self) -> None:
        """Waits until all are done, or one has failed. Keeps the error for wait()."""
        try:
            for request in self._requests:
                request.wait()
        except Error as error:
            self._error = of_torch(error)

    def settle(self) -> None:
        """Copies received data to GPU tensors and completes the futures. Idempotent.

        Must be called after look() or finish() has ended the messages.
        """
        with self._settling:
            if self._is_settled:
                return
            self._is_settled = True
            if self._error is None:
                for host, x, stream in self._landings:
                    with torch.cuda.stream(stream):
                        x.copy_(host)
            futures, self._futures = self._futures, []
            for future in futures:
                self._fill(future)

    def _fill(self, future: "torch.futures.Future[list[torch.Tensor]]") -> None:
        if self._error is not None:
            future.set_exception(self._error)
        elif self._landings:
            with torch.cuda.stream(self._landings[0][2]):
                future.set_result(self.result())
        else:
            future.set_result(self.result())

    # ---- Called by PyTorch and by users ------------------------------------------------------

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until sent tensors may be reused, and tensors to receive are filled.

        Raises:
            Timeout: A peer did not make its call in time. If `timeout` was given, the messages are
                still under way, and wait() may be called again.
            PeerLost: A peer's process ended.
            InvalidArgument: A message that arrived has another length than its tensor.
        """
        self._messages.wait(self, limit_s(timeout))
        if self._error is not None:
            raise self._error
        for _, x, stream in self._landings:
            torch.cuda.current_stream(x.device).wait_stream(stream)
        return True

    @untraced
    def is_completed(self) -> bool:
        """Tells whether all messages are done, or one has failed. Does not wait."""
        return self._is_settled or self._messages.look(self)

    @untraced
    def source_rank(self) -> int:
        """Returns the rank in the group that has sent the message, once it has been received.

        Raises:
            RuntimeError: There are several messages, or this is a send, or is still under way.
        """
        source = self._requests[0].source if len(self._requests) == 1 else None
        if source is None:
            raise RuntimeError(
                "source_rank() may only be called on work objects that correspond to a recv or "
                "recv-from-any call, and after wait()"
            )
        return source

    _source_rank = source_rank

    @untraced
    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """Returns a future that gets the tensors, or the error, when the messages have ended."""
        devices = {call.tensor.device for call in self._calls if call.tensor.is_cuda}
        future = torch.futures.Future(devices=list(devices))
        with self._settling:
            if self._is_settled:
                self._fill(future)
            else:
                self._futures.append(future)
        return future


class Messages:
    """Begins the messages of one group, and makes their progress.

    Attributes:
        comm: The communicator of the messages. It makes no other calls.
    """

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        # Held during every call of the communicator, which only one thread at a time may call.
        self._lock = threading.Lock()
        self._under_way: list[MessageWork] = []

    def start(self, calls: list[Call]) -> MessageWork:
        """Begins messages together, so that ranks may send to each other in any order."""
        work = MessageWork(self, calls)
        with self._lock:
            work.begin(self.comm)
            is_done = work.look()
            if not is_done:
                self._under_way.append(work)
        if is_done:
            work.settle()
        else:
            _mover.watch(self)
        return work

    def wait(self, work: MessageWork, seconds: float | None) -> None:
        """Waits until messages have ended.

        `seconds` is the most time to wait. If it is None, the communicator's timeout applies: then
        the communicator fails, and `work` keeps the error.

        Raises:
            Timeout: `seconds` was given, and the messages are still under way.
        """
        began = clock.now()
        limit = self.comm.timeout if seconds is None else seconds
        # Releases the lock between polls, so that another thread can begin messages that a peer
        # waits for.
        while not self.look(work):
            waited = clock.now() - began
            if waited > limit and seconds is not None:
                raise timed_out(seconds, "the peer has not sent or received the message")
            if waited > limit:
                self._fail(work)
            else:
                time.sleep(_PAUSE_S if waited > _LONG_S else 0)
        work.settle()

    def _fail(self, work: MessageWork) -> None:
        """Makes the communicator fail by a short wait, whose error names the missing peer."""
        with self._lock:
            if work in self._under_way:
                limit, self.comm.timeout = self.comm.timeout, _LAST_WAIT_S
                work.finish()
                self.comm.timeout = limit

    def look(self, work: MessageWork) -> bool:
        """Makes progress on these messages. Returns whether they have ended; False if another
        thread is calling the communicator.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if work in self._under_way:
                if not work.look():
                    return False
                self._under_way.remove(work)
        finally:
            self._lock.release()
        work.settle()
        return True

    def move(self) -> bool:
        """Makes progress on all messages of the group. Returns whether some are still under way."""
        if not self._under_way:
            return False
        # Another thread holds the lock, and makes progress itself.
        if not self._lock.acquire(blocking=False):
            return True
        try:
            done = [work for work in self._under_way if work.look()]
            self._under_way = [work for work in self._under_way if work not in done]
        finally:
            self._lock.release()
        for work in done:
            work.settle()
        return bool(self._under_way)

    def set_timeout(self, seconds: float) -> None:
        """Sets how long messages wait for each other's ranks from now on."""
        self.comm.timeout = seconds

    def check(self) -> None:
        """Raises the error of a message that is known to have failed."""
        self.comm.check()

    def abort(self) -> None:
        """Makes all ranks' waits fail."""
        self.comm.abort()

    def close(self) -> None:
        """Closes the communicator. Messages under way fail."""
        with self._lock:
            self.comm.close()
        self.move()


class _Mover:
    """The background thread that makes progress on the messages of all groups."""

    def __init__(self) -> None:
        self._groups: WeakSet[Messages] = WeakSet()
        self._is_needed = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, messages: Messages) -> None:
        """Wakes the thread for a group that has messages under way, and starts it if needed."""
        self._groups.add(messages)
        # After a fork, the child process has this object but not its thread.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="kccl-messages", daemon=True)
            self._thread.start()
        self._is_needed.set()

    def _run(self) -> None:
        while True:
            self._is_needed.wait()
            # Cleared before the poll, so that a watch() during the poll sets it again.
            self._is_needed.clear()
            # A caller that waits at once makes the progress itself, so the thread begins late.
            time.sleep(_PAUSE_S)
            if any([messages.move() for messages in list(self._groups)]):
                self._is_needed.set()


_mover = _Mover()
