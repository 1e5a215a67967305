"""Makes an answer's pieces from its tokens, and the whole answer from its pieces."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..model.executor import Token
from ..model.sample import SamplingParams


@dataclass(frozen=True)
class Piece:
    """A piece of an answer: a new token, and the text that it completes.

    Attributes:
        text: The text that this token completes. It may be empty, or include earlier tokens' text.
        id: The token's id.
        logprob: The token's log-probability. NaN unless it was asked for.
        end: "" while the answer goes on. At the last piece "max_tokens", "context", or "stop": a
            stop id or stop string came, or the grammar allows no other token.
        time_s: When the token was chosen, by time.monotonic(). If a pass with drafts chooses
            several tokens, they share the pass's time equally.
        alternatives: The likeliest tokens and their log-probabilities, the likeliest first; as many
            as SamplingParams.top_logprobs asks for.
        special: The name of a control token that is not part of `text`, as in "<|im_end|>"; "" for
            other tokens.
    """

    text: str
    id: int
    logprob: float
    end: str
    time_s: float = field(default=math.nan, compare=False)
    alternatives: tuple[tuple[int, float], ...] = ()
    special: str = ""


@dataclass(frozen=True)
class Answer:
    """A whole answer, and the time that it took.

    Attributes:
        text: The text, without the stop string.
        ids, logprobs: The tokens, including a stop id, and their log-probabilities.
        end: The last piece's Piece.end.
        params: How the tokens were chosen, with the seed that was drawn.
        num_prompt: The number of the prompt's tokens.
        first_token_s: Seconds from the call to the first token.
        tokens_per_s: Tokens a second after the first token. NaN if there is only one.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    end: str
    params: SamplingParams
    num_prompt: int
    first_token_s: float
    tokens_per_s: float


def whole_answer(
    pieces: Sequence[Piece], params: SamplingParams, num_prompt: int, began: float
) -> Answer:
    """Joins the pieces of an answer.

    Args:
        pieces: All pieces of the answer.
        params, num_prompt: As in Answer.
        began: When the answer was asked for, by time.monotonic().
    """
    times = [piece.time_s for piece in pieces]
    rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else math.nan
    return Answer(
        text="".join(piece.text for piece in pieces),
        ids=[piece.id for piece in pieces],
        logprobs=[piece.logprob for piece in pieces],
        end=pieces[-1].end,
        params=params,
        num_prompt=num_prompt,
        first_token_s=times[0] - began,
        tokens_per_s=rate,
    )


class TextOf(Protocol):
    """Decodes ids that come one by one, as TextStream does."""

    def push(self, number: int) -> str:
        """Returns the text that this id completes."""

    def hidden(self, number: int) -> str:
        """Returns the name of a control token without text in push(). Returns "" for other ids."""

    def flush(self) -> str:
        """Returns the text that remains at the answer's end."""


class StopText:
    """Makes an answer's pieces from its tokens. The text ends before the first stop string.

    As in transformers, a stop string may contain names of control tokens. These names are matched,
    although they are not part of the answer's text.
    """

    def __init__(self, stream: TextOf | None, stops: Sequence[str]) -> None:
        self._stream = stream
        self._stops = stops
        # The text that may be the beginning of a stop string, with the names of control tokens.
        self._held = ""
        # Where these names begin and end in _held.
        self._names: list[tuple[int, int]] = []

    def piece(self, token: Token) -> Piece:
        """Returns the piece for the next token."""
        if self._stream is None:
            return _piece("", token, token.end, "")
        text = self._held + self._stream.push(token.id)
        name = self._stream.hidden(token.id)
        if name:
            self._names.append((len(text), len(text) + len(name)))
            text += name
        if token.end:
            text += self._stream.flush()
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            return _piece(self._shown(text, min(found)), token, "stop", name)
        if token.end:
            return _piece(self._shown(text, len(text)), token, token.end, name)
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        shown, self._held = self._shown(text, cut), text[cut:]
        self._names = [(max(a - cut, 0), b - cut) for a, b in self._names if b > cut]
        return _piece(shown, token, "", name)

    def _shown(self, text: str, cut: int) -> str:
        """Returns text[:cut] without the names of control tokens."""
        parts, at = [], 0
        for begin, end in self._names:
            parts.append(text[at : min(begin, cut)])
            at = min(end, cut)
        return "".join([*parts, text[at:cut]])


def _piece(text: str, token: Token, end: str, name: str) -> Piece:
    return Piece(text, token.id, token.logprob, end, token.time_s, token.alternatives, name)


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the stop string's longest proper prefix with which the text ends."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
