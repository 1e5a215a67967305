"""Runs requests on an engine's ranks, one at a time. Records what the KV caches hold."""

import secrets
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

import kccl

from ..model.config import ModelConfig
from ..model.drafts import OFF, Drafts
from ..model.executor import Drafted, EndedElsewhere, Executor, Place, Token
from ..model.grammar import Grammar
from ..model.program import Op, Program
from ..model.sample import SamplingParams
from ..model.variant import USUAL, Variant
from ..text.matcher import Matcher
from .cancellation import Cancellation
from .constrained import Constrained
from .prefixes import Prefixes
from .ranks import Agreed, Ranks, Wanted
from .requests import check_room, integer, prompt_ids
from .shares import spread

# The bits of a seed that the engine draws. They are few, so that a person can type the seed again.
_SEED_BITS = 32


def seeded(params: SamplingParams) -> SamplingParams:
    """Returns the parameters with a seed, which is drawn if they need one and have none."""
    if params.temperature <= 0 or params.seed is not None:
        return params
    return replace(params, seed=secrets.randbits(_SEED_BITS))


class Runner:
    """Runs the requests of one model, on the ranks that are in this process.

    Attributes:
        ranks: The ranks.
        config: The model's configuration.
        context: The most tokens of prompt and answer together.
        params: How the newest request chooses its tokens, with the seed that was drawn for it.
        num_cached: How many ids of the newest request the KV cache had.
        drafts: How the requests from now on make drafts. Must be the same on all ranks.
        drafted: The number of drafts of the newest request.
        prefixes: The sequences that the KV cache holds.
        matcher: Makes a Matcher for a grammar.
    """

    def __init__(
        self,
        ranks: Ranks[Executor],
        config: ModelConfig,
        context: int,
        encode: Callable[[str], list[int]],
        matcher: Callable[[Grammar], Matcher],
    ) -> None:
        """Takes over the ranks. They are closed with the runner.

        Args:
            ranks, config, context: See the attributes.
            encode: Turns text into ids.
            matcher: See the attributes.
        """
        self.ranks = ranks
        self.config = config
        self.context = context
        self.params = SamplingParams()
        self.num_cached = 0
        self.drafts: Drafts = OFF
        self.drafted = Drafted()
        self.prefixes = Prefixes(ranks.mine[0].num_slots)
        self._encode, self.matcher = encode, matcher
        self._variant = USUAL

    @property
    def program(self) -> Program:
        """Returns the model's program."""
        return self.ranks.mine[0].program

    def ids(self, prompt: str | Sequence[int], room: int = 0) -> list[int]:
        """Returns the ids of a prompt. Checks that the context has room for `room` more.

        Raises:
            InvalidArgument: The prompt is empty, too long, or has an id that does not exist.
        """
        ids = prompt_ids(prompt, self._encode, self.config.vocab_size)
        check_room(ids, self.context - room, self.config, self.context)
        return ids

    def tokens(
        self,
        ids: list[int],
        params: SamplingParams,
        *,
        overlaps: bool = True,
        cancellation: Cancellation | None = None,
        waits: bool = False,
    ) -> Generator[Token, None, None]:
        """Yields the tokens of an answer. The tokens that one pass chooses come together, and their
        time_s are spread over the pass (shares.py). Closing the generator ends the request.

        Args:
            ids: The prompt, from ids().
            params: How tokens are chosen.
            overlaps: As Executor.prepare() takes it.
            cancellation: Lets another thread cancel the request.
            waits: Whether this request waits while another one runs. If not, InvalidArgument is
                raised.

        Raises:
            InvalidArgument: The engine is closed or answers another request, the ranks make
                different requests, the grammar is too complex, or drafts predict an id that the
                model does not have.
            EndedElsewhere: The request was cancelled.
            kccl.Error: The logits are not finite; or a rank was lost.
        """
        self.drafts.check_ids(self.program.config.vocab_size)
        length = min(len(ids) + params.max_tokens, self.context)
        # Requests of different kinds do not share cached keys. The kind includes Program.reach(),
        # because requests of another reach rotate keys by other frequencies.
        kind = overlaps, self.program.reach(length, self.context)
        seed = secrets.randbits(_SEED_BITS) if params.seed is None else params.seed
        what = f"generate {ids} {params} {overlaps} {self.drafts.of_all_ranks}"
        with self._request(what, ids, kind, seed, waits=waits) as (place, seed):
            if params.temperature > 0:
                params = replace(params, seed=seed)
            self.params, self.num_cached = params, place.num_cached
            self.drafted = drafted = Drafted()
            self.rotate(length)
            for each in self.ranks.mine:
                each.drafts = self.drafts
                each.prepare(params, overlaps=overlaps)
            constrained = None
            if params.grammar is not None:
                matcher = self.matcher(params.grammar)
                constrained = Constrained(self.ranks.mine, matcher, len(ids))
                self.ranks.helped_by(constrained.thread)
            for each in self.ranks.mine:
                each.start(ids, params, place=place, overlaps=overlaps)
            self.prefixes.keep(place, ids[: place.num_cached])
            generated: list[int] = []
            with (cancellation or Cancellation()).of(self._cancel):
                tokens = constrained.tokens() if constrained else self.ranks.mine[0].tokens()
                try:
                    for token in spread(tokens):
                        generated.append(token.id)
                        drafted.count(token)
                        yield token
                        if token.end:
                            break
                        self.ranks.owner.check()
                finally:
                    # Leaves out the last token, which may not have run: then the cache lacks its
                    # keys and values. Keeps nothing of other variants than USUAL, because their
                    # kernels may write wrong keys and values.
                    if generated and self._variant == USUAL:
                        self.prefixes.keep(place, [*ids, *generated[:-1]])

    def logits(self, prompt: str | Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits after each token of a prompt: float32 [tokens, vocab_size]."""
        ids = self.ids(prompt)
        (logits,) = self.scores(ids, len(ids))
        return logits

    def scores(
        self,
        ids: list[int],
        at_once: int,
        *,
        cancellation: Cancellation | None = None,
        waits: bool = False,
    ) -> Generator[NDArray[np.float32], None, None]:
        """Yields the logits after each token of a prompt, some tokens at a time: float32
        [at most at_once, vocab_size].

        Args:
            ids: The prompt, from ids().
            at_once: The most tokens whose logits are yielded at a time.
            cancellation, waits: As in tokens(). A cancelled request ends before the next logits.
                Either all ranks must pass a cancellation, or none. Only rank 0's is read.

        Raises:
            EndedElsewhere: The request was cancelled.
            InvalidArgument, kccl.Error: As tokens().
        """
        kind = True, self.program.reach(len(ids), self.context)
        # Every token of the prompt must run, because its logits are needed. So no cached prefix may
        # be reused. A search with a single id finds none, because find() always leaves at least one
        # id to run.
        with self._request(f"logits {ids} {at_once}", ids[:1], kind, waits=waits) as (place, _):
            self.rotate(len(ids))
            for each in self.ranks.mine:
                each.prepare_scoring()
            for first in range(0, len(ids), at_once):
                if cancellation is not None and self.ranks.of_rank_0(cancellation.is_asked):
                    raise EndedElsewhere
                some = ids[: first + at_once]
                place = Place(place.slot, place.slot, first)
                out = np.empty((len(some) - first, self.config.vocab_size), np.float32)
                for index, each in enumerate(self.ranks.mine):
                    each.start_scoring(some, out, writes_shared=index == 0, place=place)
                for each in self.ranks.mine:
                    each.wait()
                if self._variant == USUAL:
                    self.prefixes.keep(place, some)
                yield out
                self.ranks.owner.check()

    @contextmanager
    def _request(
        self, what: str, ids: list[int], kind: Hashable, seed: int = 0, *, waits: bool
    ) -> Iterator[Agreed]:
        """Makes a context for a request that fills a slot of the KV cache. The slot counts as empty
        until the request calls prefixes.keep().
        """
        find = partial(self.prefixes.find, ids, kind)
        with self.ranks.request(Wanted(what, find, seed, waits)) as agreed:
            self.prefixes.begin(agreed.place, kind)
            yield agreed

    def _cancel(self) -> None:
        if self.ranks.owner.is_here:
            for each in self.ranks.mine:
                each.cancel()

    def run_until(self, ids: Sequence[int], op_index: int) -> NDArray[np.float32]:
        """Returns an op's output for each id: float32 [lanes or residuals, len(ids), values], as
        the reference has it.

        Raises:
            InvalidArgument: There is no such op, or the ranks are not threads of this process.
        """
        ops = self.program.ops
        op_index = integer("op_index", op_index)
        if not 0 <= op_index < len(ops):
            raise kccl.InvalidArgument(f"op_index is {op_index}, must be below {len(ops)}")
        self.check_threads("run_until")
        (out,) = self._trace(self.ids(ids), [ops[op_index]])
        return out

    def routed(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Returns the routers' logits for each id: float32 [layers, len(ids), experts]."""
        self.check_threads("routed")
        ids, routers = self.ids(ids), [op for op in self.program.ops if op.kind == "router"]
        several = self.ranks.mine[0].traces_several
        groups = [routers] if several else [[op] for op in routers]
        return np.concatenate([out for ops in groups for out in self._trace(ids, ops)])

    def _trace(self, ids: list[int], ops: Sequence[Op]) -> list[NDArray[np.float32]]:
        """Returns ops' outputs, as run_until() does."""
        with self.ranks.request(Wanted(f"ops {[op.index for op in ops]} {ids}")):
            self.prefixes.forget()
            self.rotate(len(ids))
            outs = {
                op.index: np.empty((op.shape[0], len(ids), op.shape[1]), np.float32) for op in ops
            }
            for index, each in enumerate(self.ranks.mine):
                each.start_trace(ids, outs, writes_shared=index == 0)
            for each in self.ranks.mine:
                each.wait()
        return [self.ranks.mine[0].as_reference(op, outs[op.index]) for op in ops]

    def use(self, variant: Variant) -> None:
        """Compiles a variant of the decode kernel, which all later requests run.

        Raises:
            InvalidArgument: The backend has no kernel.
            BackendError: The kernel cannot be compiled for this model.
        """
        self.ranks.owner.check()
        self._variant = variant
        for each in self.ranks.mine:
            each.use(variant)

    def check_threads(self, what: str) -> None:
        """Raises InvalidArgument unless all ranks are threads of this process."""
        if len(self.ranks.mine) != self.ranks.world_size:
            raise kccl.InvalidArgument(f"{what} needs ranks that are threads of one process")

    def rotate(self, length: int) -> None:
        """Sets the rotations of this process's ranks for a request of `length` positions."""
        for each in self.ranks.mine:
            each.rotations.choose(length)

    def close(self) -> None:
        """Ends the request that runs, if any, and closes the ranks. May be called again."""
        self.ranks.close()
