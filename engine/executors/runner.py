"""Runs requests on an engine's ranks, one at a time, and knows what their KV caches hold."""

import secrets
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

import kccl

from ..model.config import ModelConfig
from ..model.executor import Executor, Token
from ..model.program import Program
from ..model.sample import SamplingParams
from ..model.variant import USUAL, Variant
from .ranks import Ranks
from .requests import check_room, integer, prompt_ids

# A drawn seed has so few bits that a person can type it again.
_SEED_BITS = 32


class Runner:
    """Requests of one model, on this process's part of the ranks.

    Attributes:
        ranks: The ranks.
        config: The model's configuration.
        context: Most tokens of prompt and answer together.
        params: How the newest request chooses its tokens, with the seed that was drawn for it.
        cached: The ids whose keys and values the KV cache has.
    """

    def __init__(
        self,
        ranks: Ranks[Executor],
        config: ModelConfig,
        context: int,
        encode: Callable[[str], list[int]],
    ) -> None:
        """Takes the ranks over; they are closed with the runner.

        Args:
            ranks, config, context: See the attributes.
            encode: Makes text ids.
        """
        self.ranks = ranks
        self.config = config
        self.context = context
        self.params = SamplingParams()
        self.cached: list[int] = []
        self._encode = encode
        # Whether the cached requests overlap, and their reach: see Program.reach().
        self._cached_by = (True, 0)
        self._variant = USUAL

    @property
    def program(self) -> Program:
        """The model's program."""
        return self.ranks.mine[0].program

    def ids(self, prompt: str | Sequence[int], room: int = 0) -> list[int]:
        """The ids of a prompt that leaves room for so many more.

        Raises:
            InvalidArgument: The prompt is empty, too long, or has an id that does not exist.
        """
        ids = prompt_ids(prompt, self._encode, self.config.vocab_size)
        check_room(ids, self.context - room, self.config, self.context)
        return ids

    def tokens(
        self, ids: list[int], params: SamplingParams, *, overlaps: bool = True
    ) -> Generator[Token, None, None]:
        """Yields the tokens of an answer, each as soon as it is chosen. Closing the generator ends
        the request.

        Args:
            ids: The prompt, from ids().
            params: How tokens are chosen.
            overlaps: As Executor.prepare() takes it.

        Raises:
            InvalidArgument: The engine is closed or answers another request, or the ranks make
                different ones.
            kccl.Error: The logits are not finite; or a rank was lost.
        """
        length = min(len(ids) + params.max_tokens, self.context)
        by = overlaps, self.program.reach(length, self.context)
        # At least one id must run, for its logits. Keys that were rotated otherwise are of no use.
        cached = min(_common_prefix(self.cached, ids), len(ids) - 1) if by == self._cached_by else 0
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        what = f"generate {ids} {params} {overlaps}"
        with self.ranks.request(what, cached, seed) as (start, seed):
            if params.temperature > 0:
                params = replace(params, seed=seed)
            self.params = params
            self.cached, self._cached_by = [], by
            self._rotate(length)
            for each in self.ranks.mine:
                each.prepare(params, overlaps=overlaps)
            for each in self.ranks.mine:
                each.start(ids, params, num_cached=start, overlaps=overlaps)
            generated: list[int] = []
            try:
                for token in self.ranks.mine[0].tokens():
                    generated.append(token.id)
                    yield token
                    if token.end:
                        break
            finally:
                # What another kernel adds to the cache may be wrong.
                if self._variant != USUAL:
                    self.cached = ids[:start]
                # The last token has not run, or it ran and is forgotten.
                elif generated:
                    self.cached = [*ids, *generated[:-1]]

    def logits(self, prompt: str | Sequence[int]) -> NDArray[np.float32]:
        """The logits after each token of a prompt: float32 [tokens, vocab_size]."""
        ids = self.ids(prompt)
        with self.ranks.request(f"logits {ids}"):
            self.cached = []
            self._rotate(len(ids))
            out = np.empty((len(ids), self.config.vocab_size), np.float32)
            for index, each in enumerate(self.ranks.mine):
                each.start_scoring(ids, out, writes_shared=index == 0)
            for each in self.ranks.mine:
                each.wait()
        return out

    def run_until(self, ids: Sequence[int], op_index: int) -> NDArray[np.float32]:
        """An op's output for each id: float32 [lanes or residuals, len(ids), values], as the
        reference has it.

        Raises:
            InvalidArgument: There is no such op; or the ranks are processes.
        """
        ops = self.program.ops
        op_index = integer("op_index", op_index)
        if not 0 <= op_index < len(ops):
            raise kccl.InvalidArgument(f"op_index is {op_index}, must be below {len(ops)}")
        self.check_threads("run_until")
        op, ids = ops[op_index], self.ids(ids)
        with self.ranks.request(f"op {op_index} {ids}"):
            self.cached = []
            self._rotate(len(ids))
            out = np.empty((op.shape[0], len(ids), op.shape[1]), np.float32)
            for index, each in enumerate(self.ranks.mine):
                each.start_trace(ids, op, out, writes_shared=index == 0)
            for each in self.ranks.mine:
                each.wait()
        return self.ranks.mine[0].as_reference(op, out)

    def use(self, variant: Variant) -> None:
        """Makes the requests from now on run a decode kernel, and compiles it.

        Raises:
            InvalidArgument: The backend has no kernel.
            BackendError: The kernel cannot be compiled for this model.
        """
        self._variant = variant
        for each in self.ranks.mine:
            each.use(variant)

    def check_threads(self, what: str) -> None:
        """Raises InvalidArgument unless all ranks are threads of this process."""
        if len(self.ranks.mine) != self.ranks.world_size:
            raise kccl.InvalidArgument(f"{what} needs ranks that are threads of one process")

    def _rotate(self, length: int) -> None:
        """Makes this process's ranks rotate as a request of so many positions does."""
        for each in self.ranks.mine:
            each.rotations.choose(length)

    def close(self) -> None:
        """Ends the request that runs, if one does, and the ranks. May be called again."""
        self.ranks.close()


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
