"""Reads the tokens of an answer, as the kernel writes them into host memory."""

import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from ..base.core import ENDS, lib
from ..model.executor import EndedElsewhere, Token, bad_logits
from . import task as structs
from .loading import Loaded


def tokens(task: Any, loaded: Loaded, there: Callable[[Any], Any], dtype: str) -> Iterator[Token]:
    """Yields the tokens of a request, up to its end.

    Args:
        task: The request's KcclDecodeTask.
        loaded: The rank's memory.
        there: Waits until the kernel has written a KcclDecodeToken, and returns it.
        dtype: The dtype that errors name.

    Raises:
        EndedElsewhere: The request was cancelled.
        kccl.Error: The logits are not finite.
    """
    has_drafts, pass_number = task.most_drafts != 0, 0
    for index in count():
        token = there(loaded.tokens[index])
        token_id, end = structs.id_and_end(token)
        num_drafts, is_draft = 0, False
        if has_drafts:
            token_id, num_drafts, is_draft = structs.drafts_of(token)
        if end == lib.kKcclEngineBadLogits:
            raise bad_logits(dtype)
        if end == lib.kKcclEngineCancelled:
            raise EndedElsewhere
        likeliest = map(there, loaded.choices.alternatives(task, index))
        alternatives = tuple((each.id_and_end, each.logprob) for each in likeliest)
        yield Token(
            *(token_id, token.logprob, ENDS[end], time.monotonic(), alternatives),
            *(pass_number, num_drafts, is_draft),
        )
        if ENDS[end]:
            break
        # A pass ends behind its first token that is no draft.
        pass_number += 1 if has_drafts and not is_draft else 0
