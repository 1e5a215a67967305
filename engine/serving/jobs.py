"""The jobs that an engine's queue takes. Rank 0 can send them to the other ranks as JSON."""

from collections.abc import Generator, Hashable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from ..executors.batch import Batch, Seat
from ..executors.cancellation import Cancellation
from ..executors.runner import Runner
from ..model.sample import SamplingParams, alternatives, logprobs_of
from ..text.pieces import Piece, StopText
from ..text.tokenizer import Tokenizer

T_co = TypeVar("T_co", covariant=True)

# The number of tokens whose logits are in memory at a time.
_SCORED_AT_ONCE = 128


class Job(Protocol[T_co]):
    """A request that the queue can run.

    Attributes:
        ids: The ids of its prompt.
    """

    @property
    def ids(self) -> list[int]:
        """See the attributes."""

    def order(self) -> dict[str, Any]:
        """Describes the job for the other ranks, as data that JSON can represent. From these data
        job_of() makes an equal job.
        """

    def shares(self, batch: Batch) -> Hashable:
        """Returns what the requests that run at the same time must have in common. None: this job
        runs alone.
        """

    def run(
        self, runner: Runner | Seat, tokenizer: Tokenizer | None, cancellation: Cancellation
    ) -> Generator[T_co, None, None]:
        """Runs the request, and yields its results. Collective: all ranks must call it. Only rank
        0's cancellation has an effect.

        Raises:
            EndedElsewhere: The request was cancelled.
            kccl.Error: The request failed.
        """


@dataclass(frozen=True)
class Generate:
    """A request for an answer.

    Attributes:
        ids: The prompt's ids.
        params: How tokens are chosen.
        shown: Ids of the control tokens whose names are part of the text.
    """

    ids: list[int]
    params: SamplingParams
    shown: tuple[int, ...] = ()

    def order(self) -> dict[str, Any]:
        """See Job."""
        params, shown = self.params.to_json(), list(self.shown)
        return {"kind": "generate", "ids": self.ids, "params": params, "shown": shown}

    def shares(self, batch: Batch) -> Hashable:
        """See Job."""
        return batch.reach(self.ids, self.params)

    def run(
        self, runner: Runner | Seat, tokenizer: Tokenizer | None, cancellation: Cancellation
    ) -> Generator[Piece, None, None]:
        """See Job."""
        text = StopText(tokenizer.stream(self.shown) if tokenizer else None, self.params.stop)
        tokens = runner.tokens(self.ids, self.params, cancellation=cancellation, waits=True)
        with closing(tokens):
            for token in tokens:
                piece = text.piece(token)
                yield piece
                if piece.end:
                    break


class Scored(NamedTuple):
    """The log-probability of a prompt's token.

    Attributes:
        logprob: The token's log-probability after all tokens before it.
        alternatives: The likeliest tokens at this position, as in Piece.alternatives.
    """

    logprob: float
    alternatives: list[tuple[int, float]]


@dataclass(frozen=True)
class Score:
    """A request for the log-probabilities of a prompt's tokens. The first token has none.

    Attributes:
        ids: The prompt's ids.
        num_alternatives: How many of the likeliest tokens are reported with each token.
    """

    ids: list[int]
    num_alternatives: int

    def order(self) -> dict[str, Any]:
        """See Job."""
        return {"kind": "score", "ids": self.ids, "num_alternatives": self.num_alternatives}

    def shares(self, batch: Batch) -> Hashable:
        """See Job. Its logits need all columns of a pass."""
        return None

    def run(
        self, runner: Runner | Seat, tokenizer: Tokenizer | None, cancellation: Cancellation
    ) -> Generator[Scored, None, None]:
        """See Job."""
        following = iter(self.ids[1:])
        pieces = runner.scores(self.ids, _SCORED_AT_ONCE, cancellation=cancellation, waits=True)
        with closing(pieces):
            for logits in pieces:
                # strict=False: no token of the prompt follows the last row of logits.
                for row, token in zip(logits, following, strict=False):
                    logprob = float(logprobs_of(row)[token])
                    yield Scored(logprob, alternatives(row, self.num_alternatives))


def job_of(order: dict[str, Any]) -> Job[Any]:
    """Makes the job that Job.order() has described."""
    if order["kind"] == "score":
        return Score(order["ids"], order["num_alternatives"])
    params = SamplingParams.from_json(order["params"])
    return Generate(order["ids"], params, tuple(order["shown"]))
