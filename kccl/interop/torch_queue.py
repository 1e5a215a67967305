"""Runs a group's collectives on the host in the order in which they were made. Those with
async_op=True run beside the program: on a thread of the group, or in the wait() for them.

The thread begins a little late. So a program that waits at once makes the call itself, and pays for
no change of threads.
"""

import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from ..base.errors import Error
from .torch_dynamo import untraced
from .torch_errors import of_torch
from .torch_work import Handle, Work, limit_s, timed_out

# How long the thread lets a call wait for its caller, unless the caller asks for a future.
_LATE_S = 0.0001
# How long abort() waits for the call that is under way. Only a call within gloo takes longer.
_ABORT_S = 1.0

Call = Callable[[], Any]


class HostWork(Handle):
    """The handle of an asynchronous call on the host."""

    def __init__(
        self, queue: "Queue", call: Call, tensors: list[torch.Tensor], sequence: int
    ) -> None:
        """Keeps the call until it has been made.

        Args:
            queue: The queue that it is in.
            call: Makes the call.
            tensors: The tensors that the call writes.
            sequence: The call's number in its group.
        """
        super().__init__()
        self._queue = queue
        self._call: Call | None = call
        self._tensors = tensors
        self._sequence = sequence
        # It belongs to the thread, and tensors that were made in it may be written only in it.
        self._is_inference = torch.is_inference_mode_enabled()
        self._is_done = threading.Event()
        self._filling = threading.Lock()
        self._futures: list[torch.futures.Future[list[torch.Tensor]]] = []

    # ---- Called by Queue ---------------------------------------------------------------------

    def make(self) -> None:
        """Makes the call. Keeps its error for wait()."""
        call, self._call = self._call, None
        assert call is not None
        try:
            if self._is_inference:
                with torch.inference_mode():
                    call()
            else:
                call()
        except Error as error:
            self._error = of_torch(error)
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._is_done.set()

    def fail(self, error: BaseException) -> None:
        """Ends the call, which nobody will make, with an error for wait()."""
        self._call, self._error = None, error
        self._is_done.set()

    def fill(self) -> None:
        """Completes the futures of a call that has been made. Idempotent."""
        with self._filling:
            futures, self._futures = self._futures, []
        for future in futures:
            self._complete(future)

    def _complete(self, future: "torch.futures.Future[list[torch.Tensor]]") -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            future.set_exception(self._error)

    # ---- Called by PyTorch and by users ------------------------------------------------------

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits until the call has been made.

        Raises:
            Timeout: A peer did not make its call in time. Or `timeout` was given and has passed;
                the call is still under way then, and wait() may be called again.
            PeerLost: A peer's process ended.
            InvalidArgument: An argument of the call is wrong; nothing was sent.
        """
        self._queue.finish(self, limit_s(timeout))
        if self._error is not None:
            raise self._error
        return True

    @untraced
    def is_completed(self) -> bool:
        """Tells whether the call has been made, or has failed. Does not wait."""
        return self._is_done.is_set()

    @untraced
    def _get_sequence_number(self) -> int:
        """Returns the number of the call in its group."""
        return self._sequence

    @untraced
    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """Returns a future that gets the tensors, or the error, when the call has been made."""
        if self._queue.is_its_thread():
            # A callback of another future asks, and may wait: nobody else would make the call.
            self._queue.finish(self)
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        with self._filling:
            is_done = self._is_done.is_set()
            if not is_done:
                self._futures.append(future)
        if is_done:
            self._complete(future)
        else:
            # Whoever waits for a future does not call the queue.
            self._queue.hurry()
        return future

    def is_done_within(self, seconds: float) -> bool:
        """Waits at most that long. Returns whether the call has been made."""
        return self._is_done.wait(seconds)


AnyWork = Work | HostWork


class Queue:
    """Makes the calls of one communicator one after another."""

    def __init__(self) -> None:
        # Held while a call is made. Only who holds it takes calls from the queue.
        self._making = threading.Lock()
        self._calls: deque[HostWork] = deque()
        self._is_needed = threading.Event()
        self._is_urgent = threading.Event()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def make(self, call: Call) -> None:
        """Makes a call whose caller waits, after those that are in the queue."""
        while True:
            self.finish_all()
            with self._making:
                # Another thread of the program may have added a call meanwhile.
                if not self._calls:
                    call()
                    return

    def add(self, call: Call, tensors: list[torch.Tensor], sequence: int) -> HostWork:
        """Puts an asynchronous call into the queue. `tensors` are those that it writes."""
        work = HostWork(self, call, tensors, sequence)
        self._calls.append(work)
        if self._is_closed:
            self.finish_all()
            return work
        # After a fork, the child process has this object but not its thread.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="kccl-calls", daemon=True)
            self._thread.start()
        self._is_needed.set()
        return work

    def is_its_thread(self) -> bool:
        """Tells whether the current thread is the one that makes the calls."""
        return self._thread is threading.current_thread()

    def hurry(self) -> None:
        """Lets the thread begin at once."""
        self._is_urgent.set()

    def finish(self, work: HostWork, seconds: float | None = None) -> None:
        """Makes all calls up to this one, or waits for the thread that makes them.

        Raises:
            Timeout: `seconds` was given, and has passed before the call has been made.
        """
        if seconds is not None:
            # The communicator's own timeout may be longer, so the thread must make the call.
            self.hurry()
            if not work.is_done_within(seconds):
                raise timed_out(seconds, "the call is not made yet")
        while not work.is_completed():
            self._make_next()
        # The thread that has made the call may not have come to its futures yet.
        work.fill()

    def finish_all(self) -> None:
        """Makes all calls that are in the queue."""
        while self._calls:
            self._make_next()

    def _make_next(self) -> None:
        with self._making:
            work = self._take()
            if work is not None:
                work.make()
        # Without the lock, because a future's callbacks may make calls.
        if work is not None:
            work.fill()

    def _take(self) -> HostWork | None:
        try:
            return self._calls.popleft()
        except IndexError:
            return None

    def abort(self, error: BaseException, close: Callable[[], None]) -> None:
        """Ends the thread, and fails what is in the queue. Does not wait long for the call that is
        under way.

        Args:
            error: What wait() raises for the calls in the queue.
            close: Closes the communicator. Called once no call is under way, on another thread if
                that is later.
        """
        self._is_closed = True
        while (work := self._take()) is not None:
            work.fail(error)
            work.fill()
        self._is_needed.set()
        self._is_urgent.set()
        if not self._making.acquire(timeout=_ABORT_S):
            threading.Thread(target=self._close_later, args=(close,), daemon=True).start()
            return
        try:
            close()
        finally:
            self._making.release()

    def _close_later(self, close: Callable[[], None]) -> None:
        with self._making:
            close()

    def close(self) -> None:
        """Makes what is in the queue, and ends the thread. Idempotent."""
        self.finish_all()
        # A call that the thread makes ends first.
        with self._making:
            self._is_closed = True
        # Another thread of the program may have added a call meanwhile, and this one may end.
        self.finish_all()
        self._is_needed.set()
        self._is_urgent.set()

    def _run(self) -> None:
        while not self._is_closed:
            self._is_needed.wait()
            # Cleared before the queue is looked at, so that an add() meanwhile sets it again.
            self._is_needed.clear()
            self._is_urgent.wait(_LATE_S)
            self._is_urgent.clear()
            self.finish_all()
