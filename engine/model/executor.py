"""What the engine asks of a rank, whatever runs it."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

import kccl

from .program import Op, Program
from .rotations import Rotations
from .sample import SamplingParams
from .timeline import Stamps
from .variant import Variant


class Token(NamedTuple):
    """A token as it was chosen.

    Attributes:
        id: The token.
        logprob: Its log-probability; NaN unless asked for.
        end: "" while the request goes on; "stop", "max_tokens" or "context" at its last token.
        time_s: When it was chosen, by time.monotonic().
    """

    id: int
    logprob: float
    end: str
    time_s: float


class EndedElsewhere(kccl.Error):
    """Another rank ended the request before its end."""

    def __init__(self) -> None:
        super().__init__("another rank ended the request before its end")


def bad_logits(dtype: str) -> kccl.Error:
    """The error of logits that are not finite, with weights in a dtype."""
    text = "the model's logits are NaN, or none is finite"
    if dtype == "float16":
        text += (
            "; a vector may have a value beyond 65504, the largest of float16: dtype 'bfloat16' "
            "holds it"
        )
    return kccl.Error(text)


def finite(logits: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """The logits. Raises kccl.Error if one is not finite."""
    if not np.isfinite(logits).all():
        raise bad_logits(dtype)
    return logits


class Executor(Protocol):
    """One rank's weights and KV cache. All ranks make the same calls.

    Attributes:
        program: The model's program.
        context: Positions that the KV cache has room for.
        rotations: By what it rotates. Who starts a request chooses its length there before.
        nbytes: Of this rank's packed weights.
        kv_item_bytes: Of an element of the KV cache.
        device: The name of the rank's GPU; "" on a CPU.
        cpus: On which its threads may run; none on a device.
    """

    program: Program
    context: int
    rotations: Rotations
    nbytes: int
    kv_item_bytes: int
    device: str
    cpus: Sequence[int]

    def prepare(self, params: SamplingParams, *, overlaps: bool = True) -> None:
        """Compiles and loads what start() needs for such a request. All ranks of a process do so
        before the first of them starts, because a GPU may load no kernel while another one runs.

        Args:
            params: How tokens are chosen.
            overlaps: Whether anything happens at the same time as something else. If not, each
                exchange is waited for before the next op begins, and weights are copied when they
                are needed: the same bits, slower. Only on devices.

        Raises:
            InvalidArgument: The executor cannot do that.
        """

    def start(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        *,
        num_cached: int = 0,
        overlaps: bool = True,
    ) -> None:
        """Begins to generate after `ids`, of which the cache has the first num_cached. The other
        arguments are those of prepare().
        """

    def tokens(self) -> Iterator[Token]:
        """The tokens of the request that was started, each as soon as it is chosen.

        Raises:
            kccl.Error: The logits are not finite. Or a rank was lost, did not come, or ended the
                request before its end.
        """

    def end(self) -> None:
        """Cancels the request that runs, if one does, and waits until no thread works on it.

        Raises:
            kccl.Error: A rank was lost, or did not come.
        """

    def start_scoring(
        self, ids: Sequence[int], out: NDArray[np.float32], *, writes_shared: bool
    ) -> None:
        """Begins to write the logits after each id to out, float32 [len(ids), vocab_size].

        An executor may refuse logits that are not finite, in wait().

        Args:
            ids: The tokens.
            out: Where to.
            writes_shared: Whether this rank writes what is the same on all ranks. Of ranks with the
                same array one does.
        """

    def start_trace(
        self, ids: Sequence[int], op: Op, out: NDArray[np.float32], *, writes_shared: bool
    ) -> None:
        """Begins to write what this rank has of an op's output to out, float32 [lanes or
        residuals, len(ids), values]. writes_shared as in start_scoring().
        """

    def as_reference(self, op: Op, out: NDArray[np.float32]) -> NDArray[np.float32]:
        """A trace with the elements in the reference's order."""

    def start_streaming(self, turns: int) -> None:
        """Begins to read all weights so many times, and to do nothing else."""

    def use(self, variant: Variant) -> None:
        """Makes the requests from now on run another decode kernel, and compiles it. Its tokens and
        what it adds to the cache may be wrong.

        Raises:
            InvalidArgument: The executor has no kernel.
        """

    def start_timeline(
        self, ids: Sequence[int], num_cached: int, rounds: int, out: list[Stamps]
    ) -> None:
        """Begins to generate `rounds` tokens, and appends what the rank's blocks did in each round.

        Raises:
            InvalidArgument: The kernel in use does not trace.
        """

    def wait(self) -> float:
        """Waits for the end of a request without tokens; returns the seconds that it took."""

    def close(self) -> None:
        """Ends a request as end() does, then frees what the rank has. May be called again."""
