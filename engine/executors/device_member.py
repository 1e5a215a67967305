"""A request of a batch on a device: what its reader calls while device_batch.py runs it."""

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..model.executor import EndedElsewhere, Token
from ..monokernel import answer

if TYPE_CHECKING:
    from .device_batch import BatchedDevice


class DeviceMember:
    """A request of a batch: a Member (model/batches.py)."""

    def __init__(
        self, batch: "BatchedDevice", number: int, order: dict[str, Any], look_s: float
    ) -> None:
        """Takes the number of its seat, what rank 0 tells the others about it, and how long to
        wait between two polls.
        """
        self._batch, self.number, self.order = batch, number, order
        self._look_s = look_s
        # Guarded by the batch's lock.
        self.task: Any = None  # once it has begun
        self.is_cancelled = False
        self.is_over = False  # the executor does not work on it
        self.masked = 0  # the position of the newest mask

    def tokens(self) -> Generator[Token, None, None]:
        """See Member."""
        seat = self._batch.seat(self.number)
        self._batch.until(lambda: self.task is not None or self.is_over)
        if self.task is None:
            raise EndedElsewhere
        yield from answer.tokens(self.task, seat, self._there, self._batch.dtype)

    def _there(self, token: Any) -> Any:
        number = self.task.number

        def has_come() -> bool:
            return bool(token.number == number and token.number_again == number)

        while not has_come():
            is_over = self.is_over
            self._batch.check()
            # A round's tokens are there before it ends, so this one never comes.
            if is_over and not has_come():
                raise kccl.Error("the kernel has ended without a token that was due")
            time.sleep(self._look_s)
        return token

    def post_mask(self, position: int, words: NDArray[np.uint32]) -> None:
        """See Member."""
        self._batch.until(lambda: self.task is not None or self.is_over)
        if not self.is_over:
            self._batch.seat(self.number).choices.post_mask(position, words)
            self._batch.has_mask(self, position)

    def cancel(self) -> None:
        """See Member."""
        self._batch.cancel_member(self)

    def leave(self) -> None:
        """See Member."""
        self._batch.leave(self)
