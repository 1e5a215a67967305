"""The interface by which the engine uses an executor, which is one rank."""

from collections.abc import Iterator, Mapping, Sequence
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
        id: The token's id.
        logprob: Its log-probability. NaN unless it was asked for.
        end: "" while the request goes on; "stop", "max_tokens" or "context" at its last token.
        time_s: The time at which it was chosen, by time.monotonic(). If a pass chooses several
            tokens, executors/shares.py then spreads the pass's time over them.
        alternatives: The likeliest tokens and their log-probabilities, as many as were asked for.
        pass_number: The number, within the request, of the pass that chose it. On a device always
            0 for a request without drafts.
        num_drafts: The drafts that this pass checked.
        is_draft: Whether the token was one of these drafts.
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
    """Counts the drafts of an answer's tokens so far.

    Attributes:
        proposed: The number of drafts that its passes checked.
        accepted: How many of them became tokens. Drafts after the answer's end did not.
    """

    proposed: int = 0
    accepted: int = 0
    _pass: int = field(default=-1, repr=False, compare=False)

    def count(self, token: Token) -> None:
        """Adds the drafts of the answer's next token."""
        # All tokens of a pass have the same num_drafts, so only the first one of a pass adds it.
        if token.pass_number != self._pass:
            self._pass = token.pass_number
            self.proposed += token.num_drafts
        self.accepted += token.is_draft


class Place(NamedTuple):
    """Where a request lies in the KV cache.

    Attributes:
        slot: The request's slot.
        source: The slot that has the first num_cached positions. If it is not `slot`, the executor
            copies them to `slot`.
        num_cached: How many first positions of the prompt need not run, because the cache has them.
    """

    slot: int = 0
    source: int = 0
    num_cached: int = 0


BEGINNING = Place()
"""The place of a request in slot 0 that has no cached positions."""


class EndedElsewhere(kccl.Error):
    """Raised when another rank has ended the request early."""

    def __init__(self) -> None:
        super().__init__("another rank ended the request before its end")


def bad_logits(dtype: str) -> kccl.Error:
    """Returns the error for logits that are not finite. `dtype` is that of the weights, and
    "float16" if any product has it: then the error says that bfloat16 may help.
    """
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


Traced = Mapping[int, NDArray[np.float32]]
"""Index of an op -> the array that gets its output."""


class Executor(Protocol):
    """One rank's weights and KV cache, with the methods that run requests. All ranks' methods must
    be called in the same order.

    Attributes:
        program: The model's program.
        context: The positions that a slot of the KV cache has room for.
        num_slots: The sequences that the KV cache keeps. A request uses one of these slots.
        rotations: The cosines and sines of RoPE. The caller must call rotations.choose() with a
            request's length before start().
        nbytes: The bytes of this rank's packed weights.
        kv_item_bytes: The bytes of an element of the KV cache.
        traces_several: Whether start_trace() takes several ops.
        device: The name of the rank's GPU. "" on a CPU.
        cpus: The cores on which its threads may run. Empty on a device.
        drafts: How the requests that start from now on make drafts.
    """

    program: Program
    context: int
    num_slots: int
    rotations: Rotations
    nbytes: int
    kv_item_bytes: int
    traces_several: bool
    device: str
    cpus: Sequence[int]
    drafts: Drafts

    def prepare(self, params: SamplingParams, *, overlaps: bool = True) -> None:
        """Compiles and loads the kernels that start() needs for a request with these arguments. All
        ranks of a process must call it before the first of them calls start(), because a GPU may
        load no kernel while another one runs.

        Args:
            params: How tokens are chosen.
            overlaps: Whether computing, copying and exchanging happen at the same time. If False,
                each op waits for the exchange before it, and weights are copied when they are
                needed. That is slower and has the same bits. Only devices support False.

        Raises:
            InvalidArgument: The executor does not support these arguments.
        """

    def start(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        place: Place = BEGINNING,
        overlaps: bool = True,
    ) -> None:
        """Begins to generate tokens after `ids`, and returns at once. prepare() must have been
        called with the same `params` and `overlaps`.

        Args:
            ids: The prompt's ids.
            params: How tokens are chosen.
            place: The request's slot, and the positions that the cache already has.
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
        before it chooses each token. After start(), the caller must post the mask of the first
        position after the prompt. After each token that tokens() gives, unless it ends the
        request, the caller must post the next position's mask. All ranks must get the same masks; a
        rank that chooses no tokens may ignore them. Any thread may call. Does nothing if the
        request has ended.

        The mask is applied first, before anything else of SamplingParams: the logits of ids that
        may not be chosen become minus infinity. Log-probabilities are those of the unmasked logits.

        cancel(), end() and close() end the executor's wait for a mask, and so does KCCL_TIMEOUT.

        Args:
            position: The place in the sequence that the token will have, from 0.
            words: uint32 [(vocab_size + 31) // 32]. Id i may be chosen if bit i % 32 of word
                i // 32 is set. At least one bit must be set. The caller may change the array when
                the call has returned.
        """

    def cancel(self) -> None:
        """Asks the running request to end, and does not wait. It ends at the next token; on the
        host also within a few positions of the prompt. Its tokens() then raises EndedElsewhere. A
        request that makes no tokens goes on. Any thread may call.
        """

    def end(self) -> None:
        """Cancels the request that runs, if one does, and waits until no thread works on it.

        Raises:
            kccl.Error: A rank was lost, or did not come.
        """

    def prepare_scoring(self) -> None:
        """Compiles and loads the kernel that start_scoring() needs. As with prepare(), all ranks of
        a process must call it before the first of them calls start_scoring().
        """

    def start_scoring(
        self,
        ids: Sequence[int],
        out: NDArray[np.float32],
        *,
        writes_shared: bool,
        place: Place = BEGINNING,
    ) -> None:
        """Begins to write to `out` the logits after each id that the cache does not have: float32
        [number of these ids, vocab_size]. wait() waits for the end.

        wait() may raise kccl.Error for logits that are not finite.

        Args:
            ids: The tokens' ids.
            out: The array that gets the logits.
            writes_shared: Whether this rank writes the parts that are the same on all ranks. If
                ranks share one array, it must be True for exactly one of them.
            place: As in start().
        """

    def start_trace(self, ids: Sequence[int], outs: Traced, *, writes_shared: bool) -> None:
        """Begins to run `ids`, and to write this rank's part of each op's output to its array:
        float32 [lanes or residuals, len(ids), values]. `outs` has one op if not traces_several.
        writes_shared is as in start_scoring(). wait() waits for the end.
        """

    def as_reference(self, op: Op, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns an op's output, as start_trace() wrote it, with its elements in the reference's
        order.
        """

    def start_streaming(self, turns: int) -> None:
        """Begins to read all weights `turns` times, and to do nothing else. Benchmarks measure the
        bandwidth so. wait() returns the time.
        """

    def use(self, variant: Variant) -> None:
        """Compiles another decode kernel, which all later requests run. A variant may leave work
        out, so its tokens, and what it adds to the cache, may be wrong.

        Raises:
            InvalidArgument: The executor has no kernel.
        """

    def start_timeline(
        self, ids: Sequence[int], place: Place, token_steps: int, out: list[Stamps]
    ) -> None:
        """Begins to generate `token_steps` tokens after `ids`. When they are made, appends the
        Stamps of the rank's blocks to `out`.

        Raises:
            InvalidArgument: The kernel in use does not trace.
        """

    def wait(self) -> float:
        """Waits for the end of what start_scoring(), start_trace(), start_streaming() or
        start_timeline() has begun. Returns the seconds that it took.
        """

    def close(self) -> None:
        """Ends the running request as end() does, then frees the rank's memory and threads. May be
        called again.
        """
