"""Reads the tokens of an answer, as the kernel writes them into host memory."""

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Protocol

from ..base.core import ENDS, lib
from ..model.executor import EndedElsewhere, Token, bad_logits
from . import task as structs
from .choices import Choices


class Memory(Protocol):
    """A request's memory: that of a rank (loading.Loaded), or of a seat."""

    @property
    def tokens(self) -> Any:
        """The KcclDecodeTokens that the kernel writes."""

    @property
    def choices(self) -> Choices:
        """Has the alternatives of each token."""


def tokens(task: Any, memory: Memory, there: Callable[[Any], Any], dtype: str) -> Iterator[Token]:
    """Yields the tokens of a request, up to its end.

    Args:
        task: The request's KcclDecodeTask.
        memory: Where the kernel writes.
        there: Waits until the kernel has written a KcclDecodeToken, and returns it.
        dtype: The dtype that errors name.

    Raises:
        EndedElsewhere: The request was cancelled.
        kccl.Error: The logits are not finite.
    """
    has_drafts, pass_number = task.most_drafts != 0, 0
    for index in count():
        token = there(memory.tokens[index])
        token_id, end = structs.id_and_end(token)
        num_drafts, is_draft = 0, False
        if has_drafts:
            token_id, num_drafts, is_draft = structs.drafts_of(token)
        if end == lib.kKcclEngineBadLogits:
            raise bad_logits(dtype)
        if end == lib.kKcclEngineCancelled:
            raise EndedElsewhere
        likeliest = map(there, memory.choices.alternatives(task, index))
        alternatives = tuple((each.id_and_end, each.logprob) for each in likeliest)
        yield Token(
            *(token_id, token.logprob, ENDS[end], time.monotonic(), alternatives),
            *(pass_number, num_drafts, is_draft),
        )
        if ENDS[end]:
            break
        # A pass ends behind its first token that is no draft.
        pass_number += 1 if has_drafts and not is_draft else 0
