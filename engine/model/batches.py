"""The interface of executors that run several requests at the same time."""

from collections.abc import Generator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..base.core import lib
from .executor import Executor, Place, Token
from .sample import SamplingParams

MOST_REQUESTS: int = lib.kKcclEngineMaxMembers
"""The most requests that run at the same time: a pass makes logits for so many positions."""


class Member(Protocol):
    """A request of a batch. tokens(), post_mask() and cancel() are as an Executor's."""

    def tokens(self) -> Generator[Token, None, None]:
        """See Executor."""

    def post_mask(self, position: int, words: NDArray[np.uint32]) -> None:
        """See Executor. The other requests do not wait for this one's mask."""

    def cancel(self) -> None:
        """See Executor. Only this request ends."""

    def leave(self) -> None:
        """Cancels the request, and waits until the executor does not work on it any more. Must be
        called, once, for each request that has joined. No other method may be called after it:
        another request may have the same place in the executor by then.
        """


class BatchExecutor(Executor, Protocol):
    """An Executor with batches: requests that run at the same time, and join and leave at any
    time. Each has the tokens that it would have alone.
    """

    def start_batch(self) -> None:
        """Begins a batch without requests. Its rotations are those of all requests that join. It
        goes on until end() is called. All ranks must call start_batch(); the requests join on rank
        0 alone.
        """

    def join(self, ids: Sequence[int], params: SamplingParams, place: Place) -> Member:
        """Adds a request to the batch that runs; on rank 0. Any thread may call.

        Args:
            ids: The prompt's ids.
            params: How tokens are chosen.
            place: The request's slot, which no other request of the batch has, and the positions
                that the cache has already.

        Raises:
            kccl.Error: No batch runs, because a rank was lost.
        """
