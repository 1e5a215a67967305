"""The text of an answer, piece by piece."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..model.executor import Token


@dataclass(frozen=True)
class Piece:
    """What a new token adds.

    Attributes:
        text: The text that is complete now. It may be empty, and may be that of several tokens.
        id: The token.
        logprob: The token's log-probability; NaN unless asked for.
        end: "" while the answer goes on. At the last piece "stop" (a stop id or a stop string),
            "max_tokens" or "context".
    """

    text: str
    id: int
    logprob: float
    end: str


class StopText:
    """Text of an answer, which ends before the first stop string."""

    def __init__(self, stream: Any, stops: Sequence[str]) -> None:
        self._stream = stream
        self._stops = stops
        # What may be the beginning of a stop string.
        self._held = ""

    def piece(self, token: Token) -> Piece:
        """The piece for the next token."""
        if self._stream is None:
            return Piece("", token.id, token.logprob, token.end)
        text = self._held + self._stream.push(token.id)
        if token.end:
            text += self._stream.flush()
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            return Piece(text[: min(found)], token.id, token.logprob, "stop")
        if token.end:
            return Piece(text, token.id, token.logprob, token.end)
        kept = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - kept :]
        return Piece(text[: len(text) - kept], token.id, token.logprob, "")


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of the stop string that the text ends with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
