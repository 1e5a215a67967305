"""The interface of an executor: one rank, as the engine sees it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import kccl

from .drafts import Drafts
from .program import Op, Program
from .rotations import Rotations
from .sample import SamplingParams
from .timeline import Stamps
from .variant import Variant


class Token(NamedTuple):
    """A token that was chosen.

    Attributes:
        id: The token.
        logprob: Its log-probability; NaN unless asked for.
        end: "" while the request goes on; "stop", "max_tokens" or "context" at its last token.
        time_s: The time at which it was chosen, by time.monotonic(). An answer's reader gets shares
            of a pass's time instead, if the pass chose several tokens.
        alternatives: The likeliest tokens and their log-probabilities, as many as were asked for.
        pass_number: The number of the request's pass from whose logits it was chosen. Only an
            executor that takes drafts counts them.
        num_drafts: The drafts that this pass checked.
        is_draft: Whether the token was one of them.
    """

    id: int
    logprob: float
    end: str
    time_s: float
    alternatives: tuple[tuple[int, float], ...] = ()
    pass_number: int = 0
    num_drafts: int = 0
    is_draft: bool = False


@dataclass
class Drafted:
    """The drafts of an answer, as far as it has come.

    Attributes:
        proposed: The number of drafts that its passes checked.
        accepted: How many of them became tokens. Drafts behind the answer's end did not.
    """

    proposed: int = 0
    accepted: int = 0
    _pass: int = field(default=-1, repr=False, compare=False)

    def count(self, token: Token) -> None:
        """Counts the drafts that came with the next token."""
        # All tokens of a pass have the number of its drafts.
        if token.pass_number != self._pass:
            self._pass = token.pass_number
            self.proposed += token.num_drafts
        self.accepted += token.is_draft


class Place(NamedTuple):
    """Where a request lies in the KV cache.

    Attributes:
        slot: The request's slot.
        source: The slot that has the first num_cached positions. If it is another slot, they are
            copied.
        num_cached: The number of positions that need not run.
    """

    slot: int = 0
    source: int = 0
    num_cached: int = 0


BEGINNING = Place()
"""The place of a request of which the cache has nothing."""


class EndedElsewhere(kccl.Error):
    """Raised when another rank has ended the request early."""

    def __init__(self) -> None:
        super().__init__("another rank ended the request before its end")


def bad_logits(dtype: str) -> kccl.Error:
    """Returns the error for logits that are not finite. The weights have a dtype that it names."""
    text = "the model's logits are NaN, or none is finite"
    if dtype == "float16":
        text += (
            "; a vector may have a value beyond 65504, the largest of float16: dtype 'bfloat16' "
            "holds it"
        )
    return kccl.Error(text)


def finite(logits: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Returns the logits. Raises kccl.Error if one is not finite."""
    if not np.isfinite(logits).all():
        raise bad_logits(dtype)
    return logits


class Executor(Protocol):
    """One rank's weights and KV cache, with the calls that run requests. All ranks make the same
    calls.

    Attributes:
        program: The model's program.
        context: Positions that the KV cache has room for.
        num_slots: The sequences that the KV cache keeps. A request uses one of these slots.
        rotations: The cosines and sines of RoPE. The caller sets a request's length there before
            start().
        nbytes: The bytes of this rank's packed weights.
        kv_item_bytes: The bytes of an element of the KV cache.
        device: The name of the rank's GPU; "" on a CPU.
        cpus: The cores on which its threads may run; empty on a device.
        drafts: How the requests that start from now on make drafts; always OFF on a device.
    """

    program: Program
    context: int
    num_slots: int
    rotations: Rotations
    nbytes: int
    kv_item_bytes: int
    device: str
    cpus: Sequence[int]
    drafts: Drafts

    def prepare(self, params: SamplingParams, *, overlaps: bool = True) -> None:
        """Compiles and loads all that start() needs for such a request. All ranks of a process call
        it before the first of them starts, because a GPU may load no kernel while another one runs.

        Args:
            params: How tokens are chosen.
            overlaps: Whether computing, copying and exchanging happen at the same time. If not,
                each op waits for the exchange before it, and weights are copied when they are
                needed. The bits are the same, and it is slower. Only devices have this.

        Raises:
            InvalidArgument: The executor cannot do that.
        """

    def start(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        place: Place = BEGINNING,
        overlaps: bool = True,
    ) -> None:
        """Begins to generate tokens after `ids`. The other arguments are those of prepare().

        Args:
            ids: The prompt.
            params: How tokens are chosen.
            place: Which slot the request has, and what is in the cache.
            overlaps: As in prepare().
        """

    def tokens(self) -> Iterator[Token]:
        """Returns the tokens of the request that was started, each as soon as it is chosen.

        Raises:
            kccl.Error: The logits are not finite. Or a rank was lost, did not come, or ended the
                request before its end.
        """

    def post_mask(self, position: int, words: NDArray[np.uint32]) -> None:
        """Sets which ids may be chosen for a position. A request with a grammar waits for this mask
        before it chooses each token. Its caller posts the mask of the first position behind the
        prompt after start(). It posts each further mask when tokens() has given the token before,
        unless that token ends the request. All ranks get the same masks; a rank that chooses
        nothing may ignore them. Any thread may call. Nothing happens if the request has ended.

        Ids that may not be chosen count as if their logits were minus infinity, before everything
        else that SamplingParams names. Log-probabilities stay those of all logits.

        cancel(), end() and close() end the wait, and so does the time limit of ranks' waits.

        Args:
            position: The place in the sequence that the token will have, from 0.
            words: uint32 [(vocab_size + 31) // 32]. Id i may be chosen if bit i % 32 of word
                i // 32 is set; at least one may. Read before the call returns.
        """

    def cancel(self) -> None:
        """Asks the running request to end at the next token; on the host, within a few positions of
        a prompt. Does nothing if it makes no tokens. Any thread may call. tokens() then raises
        EndedElsewhere.
        """

    def end(self) -> None:
        """Cancels the request that runs, if one does, and waits until no thread works on it.

        Raises:
            kccl.Error: A rank was lost, or did not come.
        """

    def start_scoring(
        self,
        ids: Sequence[int],
        out: NDArray[np.float32],
        *,
        writes_shared: bool,
        place: Place = BEGINNING,
    ) -> None:
        """Begins to write logits to `out`, after each id that the cache does not have: float32
        [those ids, vocab_size].

        An executor may refuse logits that are not finite, in wait().

        Args:
            ids: The tokens.
            out: The array that gets the logits.
            writes_shared: Whether this rank writes the parts that are the same on all ranks. Where
                ranks share one array, one of them does.
            place: As in start().
        """

    def start_trace(
        self, ids: Sequence[int], op: Op, out: NDArray[np.float32], *, writes_shared: bool
    ) -> None:
        """Begins to write this rank's part of an op's output to out, float32 [lanes or residuals,
        len(ids), values]. writes_shared as in start_scoring().
        """

    def as_reference(self, op: Op, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns an op's output with its elements in the reference's order."""

    def start_streaming(self, turns: int) -> None:
        """Begins to read all weights `turns` times, and to do nothing else."""

    def use(self, variant: Variant) -> None:
        """Makes the requests from now on run another decode kernel, and compiles it. Its tokens and
        what it adds to the cache may be wrong.

        Raises:
            InvalidArgument: The executor has no kernel.
        """

    def start_timeline(
        self, ids: Sequence[int], place: Place, token_steps: int, out: list[Stamps]
    ) -> None:
        """Begins to generate `token_steps` tokens, and appends what the rank's blocks did in each.

        Raises:
            InvalidArgument: The kernel in use does not trace.
        """

    def wait(self) -> float:
        """Waits for the end of a request without tokens; returns the seconds that it took."""

    def close(self) -> None:
        """Ends a request as end() does, then frees what the rank has. May be called again."""
