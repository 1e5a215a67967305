"""Measurements of an Engine, for benchmarks and studies."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import kccl

from ..model.bounds import bytes_per_token
from ..model.drafts import Drafts
from ..model.executor import Executor, Place
from ..model.sample import SamplingParams
from ..model.timeline import Stamps, Timeline, timelines
from ..model.variant import TRACING, USUAL, Variant
from .opening import check_slots, drafts_for
from .ranks import Ranks, Wanted
from .runner import Runner

# bandwidth() makes _READS requests of each length, and uses the fastest. The longer ones read all
# weights as often as fits into about _READ_S seconds.
_READS, _READ_S = 3, 0.02
# The first estimate of a reading's time is at least this part of a request's with one reading.
_MOST_FIXED = 100


class Measuring:
    """The methods of an Engine that time its requests, and measure what the ranks do in them."""

    _runner: Runner
    _ranks: Ranks[Executor]
    backend: str
    slots: int

    def bandwidth(self) -> float:
        """Returns the bytes a second at which the threads read all weights and do nothing else."""
        with self._ranks.request(Wanted("bandwidth")):
            once = self._read(1)
            turns = self._turns(once)
            if turns > 1:
                # A request also takes time that does not grow with its turns: some hundred
                # microseconds, more where a process has several ranks. So the time of one reading
                # is the difference between requests of two lengths. A first estimate of it says how
                # long the longer one must be.
                each = (self._read(1 + turns) - once) / turns
                turns = self._turns(max(each, once / _MOST_FIXED))
            once = min(once, *(self._read(1) for _ in range(_READS - 1)))
            best = once
            if turns > 1:
                best = (min(self._read(1 + turns) for _ in range(_READS)) - once) / turns
        return self._runner.program.streamed_bytes() / best

    def cache_bytes(self) -> int:
        """Returns the bytes of the caches of all ranks' cores together; 0 on devices. Weights that
        fit into these caches are read faster than memory allows. Collective.
        """
        mine = sorted({cpu for each in self._ranks.mine for cpu in each.cpus})
        cpus = {cpu for some in self._ranks.all_gather(mine) for cpu in some}
        return kccl.topology.discover().cache_bytes(cpus)

    def weight_bytes(self) -> int:
        """Returns the bytes of weights that a token reads."""
        return self._runner.program.streamed_bytes()

    def _turns(self, seconds: float) -> int:
        """Returns how many readings of so many seconds fit into _READ_S, and at least 1. All ranks
        get the same number, that of the slowest one.
        """
        slowest: float = max(self._ranks.all_gather(seconds))
        return max(1, round(_READ_S / slowest))

    def _read(self, turns: int) -> float:
        """Runs a request that reads all weights `turns` times, and returns how many seconds it
        took.
        """
        for each in self._ranks.mine:
            each.start_streaming(turns)
        return max(each.wait() for each in self._ranks.mine)

    def bytes_per_token(self, position: int) -> int:
        """Returns the bytes of weights, keys and values that the token at a position reads."""
        return bytes_per_token(self._runner.program, position, self._ranks.mine[0].kv_item_bytes)

    def timed(
        self, prompt: str | Sequence[int], max_tokens: int, *, overlaps: bool = True
    ) -> tuple[list[int], list[float]]:
        """Generates the likeliest tokens and tells when each one came, for benchmarks. No id ends
        the answer.

        Args:
            prompt: Text, or ids.
            max_tokens: Number of tokens.
            overlaps: False asks for a slow run with which a fast one can be compared: its tokens
                must be the same. All blocks of all ranks wait for each other behind each op,
                weights are copied when they are needed, and keys and values of fast runs are not
                reused. Backend "host" has no such run.

        Returns:
            The ids; and the time of the call and of each token, in seconds of time.monotonic().

        Raises:
            InvalidArgument: The backend cannot do that.
        """
        ids, began_s = self._runner.ids(prompt, room=1), time.monotonic()
        params = SamplingParams(max_tokens=max_tokens)
        tokens = list(self._runner.tokens(ids, params, overlaps=overlaps))
        return [token.id for token in tokens], [began_s, *(token.time_s for token in tokens)]

    @contextmanager
    def using(self, variant: Variant) -> Iterator[None]:
        """A context in which answers come from another decode kernel, to learn what its parts cost.
        Their tokens may be wrong. Collective.

        Raises:
            InvalidArgument: The backend has no kernel.
            BackendError: The kernel cannot be compiled for this model.
        """
        try:
            with self._ranks.request(Wanted(f"variant {variant}")):
                self._runner.use(variant)
            yield
        finally:
            self._runner.use(USUAL)

    @contextmanager
    def drafting(self, drafts: Drafts | str | int) -> Iterator[None]:
        """A context in which requests that begin have other drafts than Engine's `drafts`, so that
        one engine answers with and without them. In a job all ranks enter it.

        Raises:
            InvalidArgument: `drafts` is wrong, or the backend takes none.
        """
        drafts = drafts_for(self.backend, drafts, self.slots)
        check_slots(self.backend, self.slots, drafts)
        before, self._runner.drafts = self._runner.drafts, drafts
        try:
            yield
        finally:
            self._runner.drafts = before

    def timeline(self, prompt: str | Sequence[int], num_tokens: int) -> list[Timeline]:
        """Returns what each rank's blocks do while `tokens` tokens in a row are generated, from the
        second one behind the prompt on. The ranks must be threads.

        Raises:
            InvalidArgument: The backend has no kernel, or an argument is wrong.
        """
        # One token step before the reported ones and one after them are traced, too: see Timeline.
        token_steps, ids = num_tokens + 2, self._runner.ids(prompt)
        most = self._runner.context - len(ids) - 2
        if not 1 <= num_tokens <= most:
            raise kccl.InvalidArgument(
                f"num_tokens is {num_tokens}, must be from 1 to {most}, for which the context has "
                "room behind the prompt"
            )
        self._runner.check_threads("timeline")
        # Runs a request of this length without tracing. It leaves the prompt in the KV cache, so
        # that the traced request runs only the prompt's last id.
        self.timed(ids, token_steps)
        out: list[Stamps] = []
        newest = self._runner.prefixes.newest_slot
        cached = Place(newest, newest, len(ids) - 1)
        wanted = Wanted(f"timeline {ids}", lambda: (cached, [len(ids) - 1] * (newest + 1)))
        with self.using(TRACING), self._ranks.request(wanted) as (place, _):
            self._runner.prefixes.keep(place, ids[: place.num_cached])
            for each in self._ranks.mine:
                each.start_timeline(ids, place, token_steps, out)
            for each in self._ranks.mine:
                each.wait()
        return timelines(sorted(out, key=lambda stamps: stamps.rank))
