"""The Python interface: an Engine runs a model and yields text as it comes."""

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

import kccl

from .base.closing import Closing
from .executors.batch import batch_of
from .executors.measuring import Measuring
from .executors.opening import (
    check_ranks,
    check_slots,
    drafts_for,
    ngrams_for,
    read_for,
    rounding,
    start_ranks,
)
from .executors.requests import (
    check_needs_no_text,
    context_of,
    encoded,
    integer,
    no_tokenizer,
    params_of,
)
from .executors.runner import Runner, seeded
from .files.checkpoint import Checkpoint, open_checkpoint
from .files.models import find_model
from .files.packed_cache import PackedCache
from .model.config import ModelConfig
from .model.drafts import Drafts
from .model.executor import Drafted
from .model.sample import SamplingParams
from .serving.conversation import Conversation
from .serving.jobs import Generate
from .serving.sessions import MOST_WAITING, Sessions
from .serving.submission import CANCELLED, Submission
from .text.matcher import Matchers
from .text.pieces import Answer, Piece, StopText, whole_answer
from .text.tokenizer import Tokenizer


class Engine(Closing, Measuring):
    """A model that is ready to answer. It is a context manager.

    In a job of several processes (mpirun, `kccl run`) each rank makes an Engine of the same model
    and makes the same calls: the lanes are spread over the ranks, and all ranks get all tokens.
    Elsewhere `ranks` are threads of this process.

    Attributes:
        config: The model's configuration.
        tokenizer: The model's tokenizer.
        backend: The backend that runs the model: "host", "cuda", "hip" or "sim".
        dtype, formats: What its weights are in here: see Checkpoint.
        stored: The types in which its files store them, as in Checkpoint.stored.
        context: The most tokens that prompt and answer may have together.
        nbytes: The bytes of the packed weights of this process's ranks.
        sampling: The model's own defaults for fields of SamplingParams, by name: those of its
            generation_config.json, or of its config.json where there is none.
        matcher: Follows a grammar. With it callers can check one before they submit a request.
        slots: The most requests that it answers at the same time.
        sessions: The queue of submit(), with its length and its limit.
        notices: Sentences, one for each thing that the engine does otherwise than the files ask:
            weights that are rounded, fields of generation_config.json that are not used.
    """

    def __init__(
        self,
        model: str | Path | Checkpoint,
        backend: str = "host",
        ranks: int | None = None,
        *,
        blocks: int | None = None,
        context: int | None = None,
        prefixes: int = 1,
        slots: int = 1,
        dtype: str | None = None,
        weights: str | None = None,
        tokenizer: bool = True,
        drafts: Drafts | str | int = "off",
        packed_cache: str | Path | None = None,
        ngrams: str | Path | None = None,
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
            prefixes: Conversations whose keys and values are kept, so that the next turn of each
                computes only what is new. The least recently used gives way. Each has memory for
                a whole context; from 1 to 64.
            slots: The most requests, 1 to 8, that are answered at the same time, each with the
                tokens that it would have alone: those of submit() and, where ranks are threads, of
                stream() and generate(), from any thread. At least so many prefixes are kept. More
                than 1 is for backends "host" and "cuda" (and "sim"), without a drafter or a
                prediction (`drafts`). On GPUs as many as fit into a block's shared memory, without
                drafts, with grammars on one rank only, and not for mixtures of experts.
            dtype: What the weights are in: "bfloat16", or "float16", which the host has not; None:
                as they are stored, and rounded to bfloat16 where that is neither or the backend has
                no other. With float16, a value beyond 65504 in a vector is an error.
            weights: To what layers' matrices are rounded: "fp8", "int8", "int4" or "mxfp4"
                (Checkpoint.as_weights()); None: to nothing.
            tokenizer: Read the model's tokenizer. Without one, prompts are ids, and answers have no
                text.
            drafts: The most tokens, 1 to 7, that are guessed from the ids so far and checked in one
                pass; "auto": fewer where few are right, or none; or Drafts (see there). They change
                no token. GPUs have as many as fit into memory; "hip" and mixtures there have none.
                With `slots`, all requests that run share 8 places of a pass, for last tokens and
                drafts.
            packed_cache: A folder that keeps packed weights, so that the next start only reads
                them. It is made. Files of other models and versions stay in it.
            ngrams: A file that `kccl drafts` has made. Drafts come from it where the text has none
                to copy. None: that in the model's folder, if it has one.
            progress: Called with (bytes packed so far, all bytes) while the model is read.

        Raises:
            InvalidArgument: An argument is wrong, or the backend cannot run the model.
            kccl.Error: The model cannot be read, or it has a weight that the dtype cannot hold.
        """
        blocks = None if blocks is None else integer("blocks", blocks)
        ranks = None if ranks is None else integer("ranks", ranks)
        prefixes, slots = integer("prefixes", prefixes), integer("slots", slots)
        check_ranks(ranks)
        if isinstance(model, Checkpoint):
            checkpoint, opened = model, None
        else:
            checkpoint = opened = open_checkpoint(find_model(model))
        try:
            checkpoint = read_for(checkpoint, backend, dtype, weights)
            drafts = drafts_for(backend, drafts, slots)
            check_slots(backend, slots, drafts)
            self.config: ModelConfig = checkpoint.config
            self.dtype, self.stored = checkpoint.dtype, checkpoint.stored
            self.formats = checkpoint.formats
            self._source = checkpoint.source
            self._lacks = "has no tokenizer" if tokenizer else "was opened without its tokenizer"
            self._tokenizer: Tokenizer | None = (
                checkpoint.tokenizer() if tokenizer and checkpoint.has_tokenizer else None
            )
            defaults = checkpoint.defaults()
            if self._tokenizer is None:
                defaults = defaults.without_text()
            self.sampling, self._wrong = dict(defaults.values), defaults.wrong
            self.notices: tuple[str, ...] = (*rounding(checkpoint), *defaults.notices)
            ends = self._tokenizer.eos_ids if self._tokenizer else checkpoint.end_ids()
            self._end_ids: tuple[int, ...] = ends
            self.context = context_of(self.config, context)
            packed: PackedCache | None = None
            if packed_cache is not None:
                packed = PackedCache(Path(packed_cache), checkpoint.source, checkpoint.files)
            table = ngrams_for(checkpoint, backend, ngrams, slots)
            shape = (ranks, blocks, self.context, prefixes, slots, drafts, table)
            self._ranks = start_ranks(checkpoint, backend, *shape, progress, packed)
            if packed is not None:
                self.notices += (*dict.fromkeys(packed.notices),)
        finally:
            if opened is not None:
                opened.close()
        self.backend = backend
        self.nbytes = sum(each.nbytes for each in self._ranks.mine)
        encode = partial(encoded, self._tokenizer, self._source, self._lacks)
        self.matcher = Matchers(lambda: self.tokenizer, self.config.vocab_size)
        self._runner = Runner(self._ranks, self.config, self.context, encode, self.matcher)
        self._runner.drafts = drafts
        self.slots = slots
        batch = batch_of(self._runner, slots)
        self.sessions = Sessions(self._runner, self._tokenizer, MOST_WAITING, batch)
        # In a job, all ranks call stream(), and they run its request together, alone.
        self._streams_queue = batch is not None and len(self._ranks.mine) == self.world_size

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy {type(self).__name__}: open an Engine in each process instead"
        )

    @property
    def params(self) -> SamplingParams:
        """Tells how the newest request chooses its tokens, with the seed that was drawn for it."""
        return self._runner.params

    @property
    def drafted(self) -> Drafted:
        """Tells how many drafts the newest request has checked and accepted so far."""
        return self._runner.drafted

    @property
    def tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer."""
        if self._tokenizer is None:
            raise no_tokenizer(self._source, self._lacks)
        return self._tokenizer

    @property
    def rank(self) -> int:
        """Returns this process's rank; 0 if the ranks are threads."""
        return self._ranks.rank

    @property
    def world_size(self) -> int:
        """Returns the number of ranks over which the lanes are spread."""
        return self._ranks.world_size

    def devices(self) -> list[str]:
        """Returns the name of each rank's GPU, "" for a CPU. Collective."""
        names = self._ranks.all_gather([each.device for each in self._ranks.mine])
        return [name for some in names for name in some]

    def of_rank_0(self, value: Any) -> Any:
        """Returns rank 0's value on all ranks. JSON must represent it. Collective."""
        return self._ranks.of_rank_0(value)

    def of_processes(self, value: Any) -> list[Any]:
        """Returns the values of all processes in rank order. JSON must represent them.
        Collective.
        """
        return self._ranks.all_gather(value)

    # ---- answers ---------------------------------------------------------------------------------

    def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        shown: Collection[int] = (),
        **given: Any,
    ) -> Generator[Piece, None, None]:
        """Yields an answer piece by piece. Closing the iterator ends the answer early.

        Args:
            prompt: Text, or ids.
            params: How tokens are chosen. No stop ids are added to its own.
            shown: Control tokens whose names are part of the text.
            given: Fields of SamplingParams, in place of `params`. Those that are not given are
                `sampling`'s, the model's own. The tokenizer's end ids are stop ids unless
                `stop_ids` is given. `temperature=0` asks for the likeliest tokens.

        Raises:
            QueueFull: As many requests wait as `sessions.limit` allows. Only if `slots` is more
                than 1 and ranks are threads: then answers go through the queue.
            InvalidArgument: The prompt is empty, leaves no room in the context, or is not valid
                UTF-8; or a parameter is wrong.
            kccl.Error: The logits are not finite; a rank was lost; or the engine was closed before
                the answer's end.
        """
        return self._pieces(self._prompt(prompt), self._params(params, given), shown)

    def generate(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, **given: Any
    ) -> Answer:
        """Returns the whole answer. Arguments and errors are those of stream()."""
        began = time.monotonic()
        ids, params = self._prompt(prompt), self._params(params, given)
        if self._streams_queue:
            params = seeded(params)
            return whole_answer(list(self._pieces(ids, params)), params, len(ids), began)
        pieces = list(self._pieces(ids, params))
        return whole_answer(pieces, self.params, len(ids), began)

    def _pieces(
        self, ids: list[int], params: SamplingParams, shown: Collection[int] = ()
    ) -> Generator[Piece, None, None]:
        if self._streams_queue:
            with self.sessions.submit(Generate(ids, params, tuple(shown))) as submission:
                yield from submission
            if submission.end is not None and submission.end.reason == CANCELLED:
                raise kccl.Error("the engine was closed before the answer's end")
            return
        text = StopText(self._tokenizer.stream(shown) if self._tokenizer else None, params.stop)
        with closing(self._runner.tokens(ids, params)) as tokens:
            for token in tokens:
                piece = text.piece(token)
                yield piece
                if piece.end:
                    break

    # ---- the queue: serving/ ---------------------------------------------------------------------

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        shown: Collection[int] = (),
        **given: Any,
    ) -> Submission[Piece]:
        """Puts a request into the queue. Iterating over what it returns gives the pieces. Any
        thread of rank 0 may. In a job of several processes the other ranks call follow() instead.

        Args:
            prompt, params, shown, given: As stream()'s.

        Raises:
            QueueFull: As many requests wait as `sessions.limit` allows.
            InvalidArgument: As stream(); or this is not rank 0.
            kccl.Error: A rank was lost before.
        """
        ids, params = self._prompt(prompt), self._params(params, given)
        return self.sessions.submit(Generate(ids, params, tuple(shown)))

    def conversation(
        self, system: str | None = None, variables: Mapping[str, Any] | None = None, **given: Any
    ) -> Conversation:
        """Returns a conversation with a chat model. Its answers go through the queue.

        Args:
            system: The system's message, or None.
            variables: The variables of the chat template, as in {"enable_thinking": False}.
            given: Fields of SamplingParams for its answers.
        """
        return Conversation(self.submit, self.tokenizer, system, variables or {}, given)

    def follow(self) -> None:
        """Runs the requests that rank 0 submits, until rank 0 closes its engine. The other ranks of
        a job call it. Rank 0 must submit, or call sessions.start(), before their waits time out.

        Raises:
            kccl.Error: A rank was lost, or rank 0 has not begun in time.
        """
        self.sessions.follow()

    # ---- logits, ops, measurements (executors/measuring.py) --------------------------------------

    def logits(self, prompt: str | Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits after each token of a prompt: float32 [tokens, vocab_size]."""
        return self._runner.logits(prompt)

    def run_until(self, ids: Sequence[int], op_index: int) -> NDArray[np.float32]:
        """Returns an op's output for each id. The ranks must be threads: see Runner.run_until()."""
        return self._runner.run_until(ids, op_index)

    def routed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns the routers' logits for each id. The ranks must be threads: see Runner."""
        return self._runner.routed(ids)

    # ---- ends ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all requests, running or waiting, ends the threads, and frees the weights. A drafter
        cannot: it raises kccl.Error.
        """
        self._ranks.check_closable()
        self.sessions.close()
        self._runner.close()

    # ---- arguments -------------------------------------------------------------------------------

    def _prompt(self, prompt: str | Sequence[int]) -> list[int]:
        """Returns the ids of a prompt that leaves room for a token of an answer."""
        return self._runner.ids(prompt, room=1)

    def params_for(self, **given: Any) -> SamplingParams:
        """Returns how a request with these fields of SamplingParams chooses its tokens.

        Raises:
            InvalidArgument: One is wrong.
        """
        return self._params(None, given)

    def _params(self, params: SamplingParams | None, given: dict[str, Any]) -> SamplingParams:
        ends, size = self._end_ids, self.config.vocab_size
        params = params_of(params, given, self.sampling, self._wrong, ends, size)
        if self._tokenizer is None:
            check_needs_no_text(params, f"{self._source} {self._lacks}")
        return params
