"""A request in an engine's queue, and its answer as it comes."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from ..base.owner import Owner
from ..executors.cancellation import Cancellation
from ..model.executor import Drafted
from .jobs import Job

T = TypeVar("T")

CANCELLED = "cancelled"
"""The end of a submission that was cancelled."""


@dataclass(frozen=True)
class End:
    """The end of a submission.

    Attributes:
        reason: A reason as in Piece.end, or CANCELLED; "" if the request failed.
        error: The error of the failure, or None.
    """

    reason: str
    error: BaseException | None = None


class Submission(Generic[T]):
    """A request that waits in the queue, runs, or has ended. Iterating over it gives the results as
    they come. The engine never waits for the caller that iterates.

    It is a context manager, which cancels the request at its end.

    Attributes:
        job: The job of the request.
        cancellation: Ends it while it runs.
        num_cached: The number of the prompt's tokens that the KV cache had; -1 before the request
            runs.
        drafted: The drafts that the request has checked and accepted so far.
        end: The end of the request; None before.
    """

    def __init__(
        self, job: Job[T], cancel: Callable[["Submission[T]"], None], owner: Owner
    ) -> None:
        """Makes a submission that waits.

        Args:
            job: The job of the request.
            cancel: Cancels the request, whether it waits or runs.
            owner: The process that runs it.
        """
        self.job = job
        self.cancellation = Cancellation()
        self.num_cached = -1
        self.drafted = Drafted()
        self.end: End | None = None
        self._cancel, self._owner = cancel, owner
        self._changed = threading.Condition()
        self._items: list[T] = []
        self._listener: Callable[[T | End], None] | None = None

    def __iter__(self) -> Iterator[T]:
        """Raises the error of a failed request. Ends silently if the request was cancelled."""
        for index in count():
            # In a fork another thread may hold the lock for ever.
            self._owner.check()
            with self._changed:
                while index == len(self._items) and self.end is None:
                    self._changed.wait()
                if index == len(self._items):
                    break
                item = self._items[index]
            yield item
        if self.end is not None and self.end.error is not None:
            raise self.end.error

    def __enter__(self) -> "Submission[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the request: at once if it waits, within a few positions of its prompt, or at the
        next token. Any thread may call. Nothing happens after the request's end.
        """
        self._cancel(self)

    def listen(self, listener: Callable[[T | End], None]) -> None:
        """Passes all past and future results to a function that must never wait. The engine's
        thread calls it. The last call has the End.
        """
        self._owner.check()
        with self._changed:
            for item in self._items:
                listener(item)
            if self.end is not None:
                listener(self.end)
            self._listener = listener

    def put(self, item: T) -> None:
        """Adds a result to the answer."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
            if self._listener is not None:
                self._listener(item)

    def finish(self, end: End) -> None:
        """Ends the answer, unless it has ended before."""
        with self._changed:
            if self.end is not None:
                return
            self.end = end
            self._changed.notify_all()
            if self._listener is not None:
                self._listener(end)
