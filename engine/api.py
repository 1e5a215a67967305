"""The Python interface: an Engine runs a model and yields text as it comes."""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import kccl

from .base.closing import Closing
from .base.core import lib
from .executors.measuring import Measuring
from .executors.opening import read_for, start_ranks
from .executors.requests import context_of, integer, no_tokenizer, params_of
from .executors.runner import Runner
from .files.checkpoint import Checkpoint, open_checkpoint
from .files.defaults import read_defaults
from .files.models import find_model
from .model.config import ModelConfig
from .model.sample import SamplingParams
from .model.timeline import Timeline
from .model.variant import Variant
from .text.pieces import Piece, StopText
from .text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """A whole answer, and how long it took.

    Attributes:
        text: The text, without the stop string.
        ids, logprobs: The tokens, a stop id included.
        end: As Piece.end.
        params: How the tokens were chosen; with the seed, if there was one.
        num_prompt: Tokens of the prompt.
        first_token_s: Seconds from the call to the first token.
        tokens_per_s: Tokens a second after the first token; NaN if there is only one.
    """

    text: str
    ids: list[int]
    logprobs: list[float]
    end: str
    params: SamplingParams
    num_prompt: int
    first_token_s: float
    tokens_per_s: float


class Engine(Closing):
    """A model, ready to answer. A context manager.

    In a job of several processes (mpirun, `kccl run`) each rank makes an Engine of the same model
    and makes the same calls: the lanes are spread over the ranks, and all ranks get all tokens.
    Elsewhere `ranks` are threads of this process.

    Attributes:
        config: The model's configuration.
        tokenizer: The model's tokenizer.
        backend: What runs the model.
        dtype: What its weights are in: "bfloat16" or "float16".
        stored: How its files store them, as Checkpoint.stored.
        context: Most tokens of prompt and answer together.
        nbytes: Of the packed weights of this process's ranks.
        sampling: The model's own defaults for fields of SamplingParams, by name: those of its
            generation_config.json, or of its config.json where there is none.
        notices: What differs from what the files ask for, a sentence each: weights that are
            rounded, fields of generation_config.json that are not used.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        backend: str = "host",
        ranks: int | None = None,
        *,
        blocks: int | None = None,
        context: int | None = None,
        dtype: str | None = None,
        tokenizer: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Reads the model and packs its weights. Collective.

        Args:
            model: "bundled", "smollm2", a folder, a GGUF file, a repository in the hub's cache, as
                in "Qwen/Qwen3-0.6B", or an opened checkpoint, which stays open and belongs to the
                caller.
            backend: "host": this machine's cores. "cuda", "hip": GPUs of NVIDIA or AMD, one for
                each rank, with one kernel for a whole answer; ranks that are threads may share one.
                "sim": the same kernel in the simulator, one rank, for tiny models.
            ranks: Ranks as threads of this process, 1 to 8, outside a job; None: the job's
                processes, or 1.
            blocks: On the host, threads of each rank, at most 64; None: one for each of this
                machine's cores that the ranks may use, at least 1. On a GPU, blocks of each rank;
                None: one for each multiprocessor that has work.
            context: Tokens to make room for; None: the model's context, at most 4096. As many as
                config.longest_context are allowed.
            dtype: What the weights are in: "bfloat16", or "float16", which the host has not; None:
                as they are stored, and rounded to bfloat16 where that is neither or the backend has
                no other. With float16, a value beyond 65504 in a vector is an error.
            tokenizer: Read the model's tokenizer. Without one, prompts are ids, and answers have no
                text.
            progress: Called with (bytes packed so far, all bytes) while the model is read.

        Raises:
            InvalidArgument: An argument is wrong, or the backend cannot run the model.
            kccl.Error: The model cannot be read, or it has a weight that the dtype cannot hold.
        """
        blocks = None if blocks is None else integer("blocks", blocks)
        ranks = None if ranks is None else integer("ranks", ranks)
        if ranks is not None and not 1 <= ranks <= lib.kKcclMaxWorldSize:
            raise kccl.InvalidArgument(
                f"ranks is {ranks}, must be from 1 to {lib.kKcclMaxWorldSize}"
            )
        if ranks is not None and kccl.launched_rank() is not None:
            raise kccl.InvalidArgument(
                f"ranks is {ranks}: they are threads of one process, and a launcher has started "
                "this one as a rank of a job; leave out one of them"
            )
        if isinstance(model, Checkpoint):
            checkpoint, opened = model, None
        else:
            checkpoint = opened = open_checkpoint(find_model(model))
        try:
            checkpoint = read_for(checkpoint, backend, dtype)
            self.config: ModelConfig = checkpoint.config
            self.dtype, self.stored = checkpoint.dtype, checkpoint.stored
            self._source = checkpoint.source
            self.sampling, unknown = read_defaults(checkpoint.source)
            self.notices: tuple[str, ...] = (*_rounding(checkpoint), *unknown)
            self._lacks = "has no tokenizer" if tokenizer else "was opened without its tokenizer"
            self._tokenizer: Tokenizer | None = (
                checkpoint.tokenizer() if tokenizer and checkpoint.has_tokenizer else None
            )
            if self._tokenizer is None and (stop := self.sampling.pop("stop", None)):
                self.notices += (f"stop_strings = {stop!r:.60} is not used without a tokenizer",)
            ends = self._tokenizer.eos_ids if self._tokenizer else checkpoint.end_ids()
            self._end_ids: tuple[int, ...] = ends
            self.context = context_of(self.config, context)
            self._ranks = start_ranks(checkpoint, backend, ranks, blocks, self.context, progress)
        finally:
            if opened is not None:
                opened.close()
        self.backend = backend
        self.nbytes = sum(each.nbytes for each in self._ranks.mine)
        encode = partial(_encode, self._tokenizer, self._source, self._lacks)
        self._runner = Runner(self._ranks, self.config, self.context, encode)
        self._measuring = Measuring(self._runner)

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy {type(self).__name__}: it has threads, kernels and memory of "
            "this process; open an Engine in each process"
        )

    @property
    def params(self) -> SamplingParams:
        """How the newest request chooses its tokens, with the seed that was drawn for it."""
        return self._runner.params

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._tokenizer is None:
            raise no_tokenizer(self._source, self._lacks)
        return self._tokenizer

    @property
    def rank(self) -> int:
        """This process's rank; 0 if the ranks are threads."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """Over how many ranks the lanes are spread."""
        return self._ranks.world_size

    def devices(self) -> list[str]:
        """The name of each rank's GPU, "" for a CPU. Collective."""
        names = self._ranks.all_gather([each.device for each in self._ranks.mine])
        return [name for some in names for name in some]

    def of_rank_0(self, value: Any) -> Any:
        """What rank 0 gives, on all ranks; JSON must represent it. Collective."""
        return self.of_processes(value)[0]

    def of_processes(self, value: Any) -> list[Any]:
        """What each process gives, in rank order; JSON must represent it. Collective."""
        return self._ranks.all_gather(value)

    # ---- answers ---------------------------------------------------------------------------------

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **given: Any
    ) -> Generator[Piece, None, None]:
        """Yields an answer piece by piece. Closing the iterator ends the answer early.

        Args:
            prompt: Text, or ids.
            params: How tokens are chosen. Nothing is added to it but a seed: its stop_ids are all
                that there are.
            given: Fields of SamplingParams, in place of `params`. Those that are not given are
                `sampling`'s, the model's own. The tokenizer's end ids are stop ids unless
                `stop_ids` is given. `temperature=0` asks for the likeliest tokens.

        Raises:
            InvalidArgument: The prompt is empty, leaves no room in the context, or is not valid
                UTF-8; or a parameter is wrong.
            kccl.Error: The logits are not finite; or a rank was lost.
        """
        return self._pieces(self._prompt(prompt), self._params(params, given))

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **given: Any
    ) -> Answer:
        """The whole answer; arguments and errors as stream()."""
        began = time.monotonic()
        ids, params = self._prompt(prompt), self._params(params, given)
        times: list[float] = []
        pieces = list(self._pieces(ids, params, times))
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else float("nan")
        return Answer(
            text="".join(piece.text for piece in pieces),
            ids=[piece.id for piece in pieces],
            logprobs=[piece.logprob for piece in pieces],
            end=pieces[-1].end,
            params=self.params,
            num_prompt=len(ids),
            first_token_s=times[0] - began,
            tokens_per_s=rate,
        )

    def _pieces(
        self, ids: list[int], params: SamplingParams, times: list[float] | None = None
    ) -> Generator[Piece, None, None]:
        """Yields an answer, and appends when each token was chosen."""
        text = StopText(self._tokenizer.stream() if self._tokenizer else None, params.stop)
        with closing(self._runner.tokens(ids, params)) as tokens:
            for token in tokens:
                if times is not None:
                    times.append(token.time_s)
                piece = text.piece(token)
                yield piece
                if piece.end:
                    break

    # ---- logits, ops -----------------------------------------------------------------------------

    def logits(self, prompt: str | Sequence[int]) -> NDArray[np.float32]:
        """The logits after each token of a prompt: float32 [tokens, vocab_size]."""
        return self._runner.logits(prompt)

    def run_until(self, ids: Sequence[int], op_index: int) -> NDArray[np.float32]:
        """An op's output for each id: float32 [lanes or residuals, len(ids), values], as the
        reference has it. Only where the ranks are threads.
        """
        return self._runner.run_until(ids, op_index)

    # ---- measurements: executors/measuring.py ----------------------------------------------------

    def bandwidth(self) -> float:
        """Bytes a second at which the same threads read all weights, and do nothing else."""
        return self._measuring.bandwidth()

    def cache_bytes(self) -> int:
        """Bytes of the caches of all ranks' cores, together; 0 on devices. Weights that fit into
        them are read faster than memory allows. Collective.
        """
        return self._measuring.cache_bytes()

    def weight_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return self._measuring.weight_bytes()

    def bytes_per_token(self, position: int) -> int:
        """Bytes of weights, keys and values that the token at a position reads."""
        return self._measuring.bytes_per_token(position)

    def timed(
        self, prompt: str | Sequence[int], max_tokens: int, *, overlaps: bool = True
    ) -> tuple[list[int], list[float]]:
        """Greedy tokens, of which no id ends the answer, and when they came: for benchmarks.

        Args:
            prompt: Text, or ids.
            max_tokens: Number of tokens.
            overlaps: False: nothing happens at the same time as something else, and nothing that
                was cached otherwise is used. All blocks of all ranks wait for each other behind
                each op, and weights are copied when they are needed. The tokens are the same. So
                these are what fast ones are compared with. Not on backend "host".

        Returns:
            The ids; and the time of the call and of each token, in seconds of time.monotonic().

        Raises:
            InvalidArgument: The backend cannot do that.
        """
        return self._measuring.timed(prompt, max_tokens, overlaps=overlaps)

    def using(self, variant: Variant) -> AbstractContextManager[None]:
        """Meanwhile answers come from another decode kernel, to learn what costs how much. Their
        tokens may be wrong. Collective.

        Raises:
            InvalidArgument: The backend has no kernel.
            BackendError: The kernel cannot be compiled for this model.
        """
        return self._measuring.using(variant)

    def timeline(self, prompt: str | Sequence[int], num_tokens: int) -> list[Timeline]:
        """What each rank's blocks do while tokens are generated: of so many tokens in a row, the
        second after the prompt being the first. Only where the ranks are threads.

        Raises:
            InvalidArgument: The backend has no kernel, or an argument is wrong.
        """
        return self._measuring.timeline(prompt, num_tokens)

    # ---- ends ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the request that runs, if one does, and the threads, and frees the weights."""
        self._runner.close()

    # ---- arguments -------------------------------------------------------------------------------

    def _prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """The ids of a prompt that leaves room for a token of an answer."""
        return self._runner.ids(prompt, room=1)

    def _params(self, params: SamplingParams | None, given: dict[str, Any]) -> SamplingParams:
        params = params_of(params, given, self.sampling, self._end_ids)
        if params.stop and self._tokenizer is None:
            raise kccl.InvalidArgument(
                f"stop is {params.stop!r}, must be empty: {self._source} {self._lacks}"
            )
        return params


def _rounding(checkpoint: Checkpoint) -> list[str]:
    """Says so if the weights are not used as they are stored."""
    name = {"float16": "F16", "bfloat16": "BF16"}[checkpoint.dtype]
    others = [each for each in checkpoint.stored if each != name]
    if not others:
        return []
    return [f"weights are rounded from {', '.join(others)} to {checkpoint.dtype}"]


def _encode(tokenizer: Tokenizer | None, source: Path, lacks: str, text: str) -> list[int]:
    if tokenizer is None:
        raise no_tokenizer(source, lacks)
    return tokenizer.encode(text)
