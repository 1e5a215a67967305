"""A request in an engine's queue, through which its caller receives the results."""

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
"""End.reason of a submission that was cancelled."""


@dataclass(frozen=True)
class End:
    """The end of a submission.

    Attributes:
        reason: As in Piece.end, or CANCELLED. "" if the request failed.
        error: The error if the request failed, else None.
    """

    reason: str
    error: BaseException | None = None


class Submission(Generic[T]):
    """A request that waits in the queue, runs, or has ended. Iterating over it yields the results
    as they come. Results are stored, so the engine never waits for its caller to iterate.

    A context manager, which cancels the request at the context's end.

    Attributes:
        job: The job of the request.
        cancellation: Cancels the request while it runs. Callers should call cancel().
        num_cached: The number of the prompt's tokens that the KV cache had. -1 before the first
            result.
        drafted: The number of drafts that the request has checked and accepted so far.
        end: The end of the request. None while it has not ended.
    """

    def __init__(
        self, job: Job[T], cancel: Callable[["Submission[T]"], None], owner: Owner
    ) -> None:
        """Makes a submission that waits.

        Args:
            job: The job of the request.
            cancel: Cancels the request, whether it waits or runs.
            owner: The process that runs the request.
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
        """Yields the results as they come. Raises the error of a failed request at the end. Ends
        without an error if the request was cancelled.
        """
        for index in count():
            # Raises in a fork, where the lock may be held for ever by a thread that does not exist.
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
        """Cancels the request. If it waits, it ends at once; if it runs, within a few positions of
        its prompt, or at the next token. Any thread may call. Does nothing after the request's end.
        """
        self._cancel(self)

    def listen(self, listener: Callable[[T | End], None]) -> None:
        """Passes all results, past and future, to a function, and then the End. The engine's thread
        calls the function for future results, so it must not block.
        """
        self._owner.check()
        with self._changed:
            for item in self._items:
                listener(item)
            if self.end is not None:
                listener(self.end)
            self._listener = listener

    def put(self, item: T) -> None:
        """Adds a result. The engine's thread calls it."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
            if self._listener is not None:
                self._listener(item)

    def finish(self, end: End) -> None:
        """Ends the submission, unless it has ended before."""
        with self._changed:
            if self.end is not None:
                return
            self.end = end
            self._changed.notify_all()
            if self._listener is not None:
                self._listener(end)
