"""Makes the tokens of a request with a grammar. A thread posts a mask, the ids that the grammar
allows, for each position.
"""

import contextlib
import threading
from collections.abc import Generator, Sequence
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.owner import Owner
from ..model.batches import Member
from ..model.executor import Executor, Token
from ..text.matcher import Matcher
from .drafting import is_drafting


class Constrained:
    """Makes the masks of one request. While the executors compute a position's logits, a thread of
    this class computes the mask of that position. So no executor has to wait until the answer's
    reader asks for the next token.
    """

    def __init__(
        self, executors: Sequence[Executor] | Sequence[Member], matcher: Matcher, first: int
    ) -> None:
        """Computes the first mask, which may take long. Must be called before the executors'
        start(), whose wait for the first mask has a limit. A batch's member has joined already. The
        batch's passes leave it out until it has its mask.

        Args:
            executors: The executors of this process's ranks, or a request of a batch.
            matcher: Follows the grammar. It must be at the grammar's beginning.
            first: The position of the answer's first token in the sequence.

        Raises:
            InvalidArgument: The grammar is too complex, or allows none of the model's tokens.
        """
        self._executors, self._matcher, self._first = executors, matcher, first
        self._first_mask = matcher.first_mask()
        self._owner = Owner()
        self._arrived: SimpleQueue[Token | BaseException] = SimpleQueue()
        # A daemon thread, so that the process can exit although nobody reads an answer to its end.
        self.thread = threading.Thread(target=self._work, name="kccl grammar", daemon=True)

    def tokens(self) -> Generator[Token, None, None]:
        """Yields the tokens of the request that was started, as Executor.tokens() does. Ends the
        request at a token after which the grammar allows no other.

        Raises:
            InvalidArgument: The grammar is too complex at some position.
            kccl.Error: As in Executor.tokens().
        """
        self.thread.start()
        try:
            while True:
                item = self._arrived.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.end:
                    break
        finally:
            self._cancel()
            # The garbage collector may close this generator in any thread. self.thread cannot join
            # itself. A thread that runs a drafter cannot join it either, because self.thread waits
            # for the drafter.
            is_here = self.thread is threading.current_thread()
            if not is_here and not is_drafting(self._executors):
                self.thread.join()

    def _work(self) -> None:
        try:
            self._post(self._first, self._first_mask)
            for following, token in enumerate(self._executors[0].tokens(), self._first + 1):
                ends = token.end or self._follow(token.id, following)
                self._arrived.put(token._replace(end=ends))
                if ends:
                    # If the grammar ended the request, the executors still wait for the next mask.
                    # Cancelling the request ends their wait.
                    self._cancel()
                    break
        except BaseException as error:
            self._arrived.put(error)

    def _follow(self, number: int, position: int) -> str:
        """Advances the matcher by the token `number`, and posts the mask of the next position.
        Returns "" then. Returns "stop" and posts nothing if the grammar allows no further token.
        """
        self._matcher.push(number)
        mask = None if self._matcher.has_ended else self._matcher.mask()
        if mask is None:
            return "stop"
        self._post(position, mask)
        return ""

    def _cancel(self) -> None:
        if not self._owner.is_here:
            return
        for each in self._executors:
            # A closed executor raises kccl.Error. That is no failure: close() has ended the
            # request.
            with contextlib.suppress(kccl.Error):
                each.cancel()

    def _post(self, position: int, mask: NDArray[np.uint32]) -> None:
        for each in self._executors:
            each.post_mask(position, mask)
