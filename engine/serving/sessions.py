"""The queue of an engine. Rank 0 submits requests, and all ranks run them, one after the other or
some at a time.
"""

import threading
from collections import deque
from typing import Any, TypeVar

import kccl

from ..executors.batch import Batch, Seat
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
    """The queue of requests. A thread of rank 0 runs them in the order in which they came. With a
    batch there is a thread for each of its seats. A request that must run alone then waits until
    the others have ended, and those behind it wait for its end.

    Attributes:
        limit: The most requests that may wait.
        failure: The error after which the ranks cannot run requests any more. None while they can.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None,
        limit: int,
        batch: Batch | None = None,
    ) -> None:
        """Begins with an empty queue. The threads start with the first request.

        Args:
            runner: Runs the requests. The caller must close it.
            tokenizer: Converts ids to text. If None, answers have no text.
            limit: The most requests that may wait.
            batch: Runs several requests at a time. None: they run one after the other.
        """
        self.limit = limit
        self.failure: BaseException | None = None
        self._runner, self._tokenizer, self._batch = runner, tokenizer, batch
        if batch is not None:
            batch.tell = self._tell
        ranks = runner.ranks
        self._owner = ranks.owner
        self._has_others = len(ranks.mine) < ranks.world_size
        self._beat_s = ranks.wait_s * _BEAT_SHARE if self._has_others else None
        self._changed = threading.Condition()
        self._queue: deque[Submission[Any]] = deque()
        self._running: list[Submission[Any]] = []
        self._threads: list[threading.Thread] = []
        # Held while this process tells the other ranks something.
        self._line = threading.Lock()
        self._is_draining = self._is_closing = False

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests that wait."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Returns the number of requests that run."""
        return len(self._running)

    # ---- rank 0 ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the threads, if they do not run yet. From then on the other ranks must call
        follow().
        """
        self._owner.check()
        with self._changed:
            if self._runner.ranks.rank != 0:
                raise kccl.InvalidArgument(
                    f"rank {self._runner.ranks.rank} cannot submit: rank 0 does, and the others "
                    "call follow()"
                )
            if not self._threads:
                seats = [self._runner] if self._batch is None else self._batch.seats
                self._threads = [
                    threading.Thread(
                        target=self._work, args=(each,), name="kccl queue", daemon=True
                    )
                    for each in seats
                ]
                for each in self._threads:
                    each.start()

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
            return self._changed.wait_for(lambda: not self._queue and not self._running, seconds)

    def close(self) -> None:
        """Cancels all requests, ends the threads, and makes follow() return on the other ranks. May
        be called again. Does nothing in a fork of the process.
        """
        if not self._owner.is_here:
            return
        with self._changed:
            self._is_closing = True
            waiting, self._queue = list(self._queue), deque()
            running, threads = list(self._running), list(self._threads)
            self._changed.notify_all()
        for each in waiting:
            each.finish(End(CANCELLED))
        for each in running:
            each.cancellation.ask()
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join()

    def wait_for_failure(self) -> BaseException | None:
        """Waits until the ranks cannot run requests any more, or close() is called. Returns
        `failure`.
        """
        self._owner.check()
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._is_closing)
            return self.failure

    def _work(self, runner: Runner | Seat) -> None:
        """Runs requests from the queue, one after the other."""
        # The first thread also tells the other ranks that this one is alive, and of the end.
        is_first = threading.current_thread() is self._threads[0]
        while True:
            with self._changed:
                limit_s = self._beat_s if is_first else None
                self._changed.wait_for(lambda: self._may_begin() or self._is_closing, limit_s)
                submission = self._queue.popleft() if self._may_begin() else None
                if submission is not None:
                    self._running.append(submission)
                is_closing = self._is_closing
            try:
                if submission is not None:
                    self._run(submission, runner)
                elif is_first:
                    self._idle(is_closing)
            # Catches every BaseException: if this thread ended, requests would wait for ever.
            except BaseException as error:
                self._fail(error)
            with self._changed:
                if submission is not None:
                    self._running.remove(submission)
                self._changed.notify_all()
            if submission is None and (is_closing or self.failure is not None):
                return

    def _may_begin(self) -> bool:
        """Tells whether the oldest request that waits may run beside those that run."""
        if not self._queue or not self._running:
            return bool(self._queue)
        if self._batch is None:
            return False
        first, *others = [self._queue[0], *self._running]
        shares = first.job.shares(self._batch)
        return shares is not None and all(each.job.shares(self._batch) == shares for each in others)

    def _idle(self, is_closing: bool) -> None:
        """Tells the other ranks that this one is alive, or that there is nothing more to run."""
        if is_closing:
            with self._changed:
                self._changed.wait_for(lambda: not self._running)
            self._tell(_END)
            return
        with self._line:
            # Requests that run tell the other ranks enough.
            if not self._running:
                self._tell_now(_BEAT)

    def _tell(self, order: dict[str, Any]) -> None:
        with self._line:
            self._tell_now(order)

    def _tell_now(self, order: dict[str, Any]) -> None:
        if self._has_others and self.failure is None:
            self._runner.ranks.of_rank_0(order)

    def _run(self, submission: Submission[Any], runner: Runner | Seat) -> None:
        end = End("")
        try:
            # A batch tells the other ranks itself when it begins.
            if self._batch is None or submission.job.shares(self._batch) is None:
                self._tell(submission.job.order())
            items = submission.job.run(runner, self._tokenizer, submission.cancellation)
            for item in items:
                if submission.num_cached < 0:
                    submission.num_cached = runner.num_cached
                    submission.drafted = runner.drafted
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
            self.failure = self.failure or error
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
                if self._batch is not None and order["kind"] == "batch":
                    self._batch.follow(order["length"])
                    continue
                for _ in job_of(order).run(self._runner, None, Cancellation()):
                    pass
            except EndedElsewhere:
                continue
            except kccl.Error as error:
                # Rank 0 has the same error, and reports it to the request's caller.
                if isinstance(error, FATAL):
                    raise
