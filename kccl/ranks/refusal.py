"""A refusal: the message of a rank that cannot start. All other ranks raise an error with its text.

A rank may fail before it is connected with the others: a variable of its environment is wrong, or
it may open too few files. Without a refusal the others would wait for it until they time out.
"""

import json
from collections.abc import Sequence

from .messages import own_failure, peers_failure, reason_of

WAITS_S = 5.0
"""Seconds that a rank which cannot start waits for ranks to which it has not sent its refusal
yet.
"""

_KEY = "refusal"


def refusal(error: BaseException, rank: int, most_bytes: int) -> tuple[BaseException, str]:
    """Returns the error of a rank that cannot start, and its string for the others.

    Args:
        error: Why the rank cannot start. If it is a BackendError, its text gets the rank.
        rank: The rank.
        most_bytes: The most bytes that the string may have. A longer text is cut.
    """
    mine = own_failure(error, rank, "start-up")
    source, kind, text, peer = json.loads(reason_of(mine, rank))
    while True:
        said = json.dumps({_KEY: json.dumps([source, kind, text, peer])})
        if len(said.encode()) <= most_bytes:
            return mine, said
        text = text[: len(text) * 3 // 4] + "..."


def first_refusal(texts: Sequence[str]) -> str | None:
    """Returns the first of the ranks' strings that is a refusal; None if none is."""
    return next((text for text in texts if text.startswith(f'{{"{_KEY}"')), None)


def check(texts: Sequence[str], rank: int) -> None:
    """Raises the error of the first refusal, if a rank cannot start.

    Args:
        texts: The ranks' strings.
        rank: The rank that reads them.
    """
    found = first_refusal(texts)
    if found is not None:
        _, error = peers_failure(json.loads(found)[_KEY].encode(), rank, "start-up")
        raise error
