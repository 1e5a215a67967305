"""What benchmarks and studies ask of an Engine."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import kccl

from ..model.bounds import bytes_per_token
from ..model.sample import SamplingParams
from ..model.timeline import Stamps, Timeline, timelines
from ..model.variant import TRACING, USUAL, Variant
from .runner import Runner

# bandwidth() reads all weights in so many requests, each of at least so many seconds; the fastest
# counts.
_READS, _READ_S = 4, 0.02


class Measuring:
    """Times an engine's requests, and looks inside."""

    def __init__(self, runner: Runner) -> None:
        """Measures the requests of a runner, which stays its owner's."""
        self._runner = runner
        self._ranks = runner.ranks
        self._config = runner.config

    def bandwidth(self) -> float:
        """Bytes a second at which the same threads read all weights, and do nothing else."""
        with self._ranks.request("bandwidth"):
            best = self._read(1)
            # The ranks decide alike: they take the slowest one's time.
            slowest = max(self._ranks.all_gather(best))
            turns = math.ceil(_READ_S / slowest)
            best = min([best, *(self._read(turns) for _ in range(_READS - 1))])
        return self._config.streamed_bytes() / best

    def cache_bytes(self) -> int:
        """See Engine.cache_bytes()."""
        mine = sorted({cpu for each in self._ranks.mine for cpu in each.cpus})
        cpus = {cpu for some in self._ranks.all_gather(mine) for cpu in some}
        return kccl.topology.discover().cache_bytes(cpus)

    def weight_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return self._config.streamed_bytes()

    def _read(self, turns: int) -> float:
        """Seconds of one turn."""
        for each in self._ranks.mine:
            each.start_streaming(turns)
        return max([each.wait() for each in self._ranks.mine]) / turns

    def bytes_per_token(self, position: int) -> int:
        """Bytes of weights, keys and values that the token at a position reads."""
        return bytes_per_token(self._config, position, self._ranks.mine[0].kv_item_bytes)

    def timed(
        self, prompt: str | Sequence[int], max_tokens: int, *, overlaps: bool = True
    ) -> tuple[list[int], list[float]]:
        """See Engine.timed()."""
        ids, began_s = self._runner.ids(prompt, room=1), time.monotonic()
        params = SamplingParams(max_tokens=max_tokens)
        tokens = list(self._runner.tokens(ids, params, overlaps=overlaps))
        return [token.id for token in tokens], [began_s, *(token.time_s for token in tokens)]

    @contextmanager
    def using(self, variant: Variant) -> Iterator[None]:
        """See Engine.using()."""
        try:
            with self._ranks.request(f"variant {variant}"):
                self._runner.use(variant)
            yield
        finally:
            self._runner.use(USUAL)

    def timeline(self, prompt: str | Sequence[int], num_tokens: int) -> list[Timeline]:
        """See Engine.timeline()."""
        # One round before those that are kept, and one behind them.
        rounds, ids = num_tokens + 2, self._runner.ids(prompt)
        most = self._runner.context - len(ids) - 2
        if not 1 <= num_tokens <= most:
            raise kccl.InvalidArgument(
                f"num_tokens is {num_tokens}, must be from 1 to {most}, for which the context has "
                "room behind the prompt"
            )
        self._runner.check_threads("timeline")
        # The cache must be that of a request as long as this one.
        self.timed(ids, rounds)
        out: list[Stamps] = []
        with (
            self.using(TRACING),
            self._ranks.request(f"timeline {ids}", len(ids) - 1) as (start, _),
        ):
            self._runner.cached = ids[:start]
            for each in self._ranks.mine:
                each.start_timeline(ids, start, rounds, out)
            for each in self._ranks.mine:
                each.wait()
        return timelines(sorted(out, key=lambda stamps: stamps.rank))
