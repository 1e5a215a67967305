"""The queue of an engine. Rank 0 submits requests, and all ranks run them one after the other."""

import threading
from collections import deque
from typing import Any, TypeVar

import kccl

from ..executors.cancellation import Cancellation
from ..executors.runner import Runner
from ..model.executor import EndedElsewhere
from ..text.tokenizer import Tokenizer
from .jobs import Job, job_of
from .submission import CANCELLED, End, Submission

T = TypeVar("T")

# The default of Sessions.limit.
MOST_WAITING = 64

FATAL = (kccl.PeerLost, kccl.Timeout, kccl.BackendError)
"""Errors after which the ranks cannot run any more requests together."""
_BEAT, _END = {"kind": "beat"}, {"kind": "end"}
# While no request comes, rank 0 tells the other ranks that it is alive. It does so whenever this
# share of their waits' timeout has passed.
_BEAT_SHARE = 0.2


class QueueFull(kccl.Error):
    """Raised by submit() if so many requests wait that another one is refused."""


class Sessions:
    """The queue of requests. A thread of rank 0 runs them in the order in which they came.

    Attributes:
        limit: The most requests that may wait.
        failure: The error after which the ranks cannot run requests any more. None while they can.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer | None, limit: int) -> None:
        """Begins with an empty queue. The thread starts with the first request.

        Args:
            runner: Runs the requests. The caller must close it.
            tokenizer: Converts ids to text. If None, answers have no text.
            limit: The most requests that may wait.
        """
        self.limit = limit
        self.failure: BaseException | None = None
        self._runner, self._tokenizer = runner, tokenizer
        ranks = runner.ranks
        self._owner = ranks.owner
        self._has_others = len(ranks.mine) < ranks.world_size
        self._beat_s = ranks.wait_s * _BEAT_SHARE if self._has_others else None
        self._changed = threading.Condition()
        self._queue: deque[Submission[Any]] = deque()
        self._running: Submission[Any] | None = None
        self._thread: threading.Thread | None = None
        self._is_draining = self._is_closing = False

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that wait."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Returns the number of requests that run: 0 or 1."""
        return 0 if self._running is None else 1

    # ---- rank 0 ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, if it does not run yet. From then on the other ranks must call
        follow().
        """
        self._owner.check()
        with self._changed:
            if self._runner.ranks.rank != 0:
                raise kccl.InvalidArgument(
                    f"rank {self._runner.ranks.rank} cannot submit: rank 0 does, and the others "
                    "call follow()"
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kccl queue", daemon=True)
                self._thread.start()

    def submit(self, job: Job[T]) -> Submission[T]:
        """Adds a request to the queue's end. Returns at once.

        Raises:
            QueueFull: `limit` requests wait already.
            InvalidArgument: The engine is closed, or this is not rank 0.
            kccl.Error: The ranks cannot run requests any more.
        """
        self.start()
        submission = Submission(job, self._cancel, self._owner)
        with self._changed:
            if self._is_draining or self._is_closing:
                raise kccl.InvalidArgument("the engine is closed")
            if self.failure is not None:
                raise kccl.Error(f"the engine has failed: {self.failure}") from self.failure
            if len(self._queue) >= self.limit:
                raise QueueFull(
                    f"{len(self._queue)} requests wait, must be fewer than {self.limit}: try again "
                    "later"
                )
            self._queue.append(submission)
            self._changed.notify_all()
        return submission

    def _cancel(self, submission: Submission[Any]) -> None:
        if not self._owner.is_here:
            return
        with self._changed:
            waits = submission in self._queue
            if waits:
                self._queue.remove(submission)
        if waits:
            submission.finish(End(CANCELLED))
        elif submission.end is None:
            submission.cancellation.ask()

    def drain(self, seconds: float | None = None) -> bool:
        """Refuses new requests, and waits until those in the queue have ended.

        Args:
            seconds: The timeout. None means that there is none.

        Returns:
            Whether all requests have ended.
        """
        self._owner.check()
        with self._changed:
            self._is_draining = True
            return self._changed.wait_for(
                lambda: not self._queue and self._running is None, seconds
            )

    def close(self) -> None:
        """Cancels all requests, ends the thread, and makes follow() return on the other ranks. May
        be called again. Does nothing in a fork of the process.
        """
        if not self._owner.is_here:
            return
        with self._changed:
            self._is_closing = True
            waiting, self._queue = list(self._queue), deque()
            running, thread = self._running, self._thread
            self._changed.notify_all()
        for each in waiting:
            each.finish(End(CANCELLED))
        if running is not None:
            running.cancellation.ask()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def wait_for_failure(self) -> BaseException | None:
        """Waits until the ranks cannot run requests any more, or close() is called. Returns
        `failure`.
        """
        self._owner.check()
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._is_closing)
            return self.failure

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing, self._beat_s)
                submission = self._queue.popleft() if self._queue else None
                self._running = submission
                is_closing = self._is_closing
            try:
                if submission is None:
                    self._tell(_END if is_closing else _BEAT)
                else:
                    self._run(submission)
            # Catches every BaseException: if this thread ended, requests would wait for ever.
            except BaseException as error:
                self._fail(error)
            with self._changed:
                self._running = None
                self._changed.notify_all()
            if submission is None and (is_closing or self.failure is not None):
                return

    def _tell(self, order: dict[str, Any]) -> None:
        if self._has_others and self.failure is None:
            self._runner.ranks.of_rank_0(order)

    def _run(self, submission: Submission[Any]) -> None:
        end = End("")
        try:
            self._tell(submission.job.order())
            items = submission.job.run(self._runner, self._tokenizer, submission.cancellation)
            for item in items:
                if submission.num_cached < 0:
                    submission.num_cached = self._runner.num_cached
                    submission.drafted = self._runner.drafted
                submission.put(item)
                end = End(getattr(item, "end", ""))
        except EndedElsewhere:
            end = End(CANCELLED)
        except BaseException as error:
            end = End("", error)
            # After a BaseException that is no Exception, ranks may be at different points of the
            # request.
            if isinstance(error, FATAL) or not isinstance(error, Exception):
                self._fail(error)
        submission.finish(end)

    def _fail(self, error: BaseException) -> None:
        """Records that the ranks cannot run requests any more, and ends those that wait."""
        with self._changed:
            self.failure = error
            waiting, self._queue = list(self._queue), deque()
            self._changed.notify_all()
        for each in waiting:
            each.finish(End("", error))

    # ---- the other ranks -------------------------------------------------------------------------

    def follow(self) -> None:
        """Runs the requests that rank 0 submits, until rank 0 closes its engine. All other ranks of
        a job must call it.

        Rank 0 must call start() or submit() before the ranks' waits time out. If it calls neither,
        its close() does not end follow(), which raises.

        Raises:
            kccl.Error: A rank was lost, or rank 0 has not begun in time.
        """
        while True:
            order = self._runner.ranks.of_rank_0(None)
            if order == _END:
                return
            if order == _BEAT:
                continue
            try:
                for _ in job_of(order).run(self._runner, None, Cancellation()):
                    pass
            except EndedElsewhere:
                continue
            except kccl.Error as error:
                # Rank 0 has the same error, and reports it to the request's caller.
                if isinstance(error, FATAL):
                    raise
