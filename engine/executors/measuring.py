"""What benchmarks and studies ask of an Engine."""

import math
import time
from abc import abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import kccl

from ..base.closing import Closing
from ..model.bounds import bytes_per_token
from ..model.config import ModelConfig
from ..model.executor import Executor
from ..model.sample import SamplingParams
from ..monokernel.trace import Stamps, Timeline, timelines
from ..monokernel.variant import TRACING, USUAL, Variant
from ..text.pieces import Piece
from .ranks import Ranks

# bandwidth() reads all weights in so many requests, each of at least so many seconds; the fastest
# counts.
_READS, _READ_S = 4, 0.02


class Measuring(Closing):
    """The part of Engine (api.py) that times it and looks inside."""

    config: ModelConfig
    context: int
    _ranks: Ranks[Executor]
    # The ids whose keys and values the cache has.
    _cached: list[int]
    # Whether they come from requests that overlap, and the reach of these: see Program.reach().
    _cached_by: tuple[bool, int]
    # The decode kernel in use.
    _variant: Variant

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise TypeError(
            f"cannot pickle or copy {type(self).__name__}: it has threads, kernels and memory of "
            "this process; open an Engine in each process"
        )

    @property
    @abstractmethod
    def world_size(self) -> int:
        """Over how many ranks the lanes are spread."""

    @abstractmethod
    def _ids(self, prompt: str | Sequence[int], room: int = 0) -> list[int]:
        """The ids of a prompt that leaves room for so many more."""

    @abstractmethod
    def _pieces(
        self,
        ids: list[int],
        params: SamplingParams,
        times: list[float] | None = None,
        *,
        overlaps: bool = True,
    ) -> Generator[Piece, None, None]:
        """Yields an answer, and appends when each token was chosen."""

    def bandwidth(self) -> float:
        """Bytes a second at which the same threads read all weights, and do nothing else."""
        with self._ranks.request("bandwidth"):
            best = self._read(1)
            # The ranks decide alike: they take the slowest one's time.
            slowest = max(self._ranks.all_gather(best))
            turns = math.ceil(_READ_S / slowest)
            best = min([best, *(self._read(turns) for _ in range(_READS - 1))])
        return self.config.streamed_bytes() / best

    def cache_bytes(self) -> int:
        """Bytes of the caches of all ranks' cores, together; 0 on devices. Weights that fit into
        them are read faster than memory allows. Collective.
        """
        mine = sorted({cpu for each in self._ranks.mine for cpu in each.cpus})
        cpus = {cpu for some in self._ranks.all_gather(mine) for cpu in some}
        return kccl.topology.discover().cache_bytes(cpus)

    def weight_bytes(self) -> int:
        """Bytes of weights that a token reads."""
        return self.config.streamed_bytes()

    def _read(self, turns: int) -> float:
        """Seconds of one turn."""
        for each in self._ranks.mine:
            each.start_streaming(turns)
        return max([each.wait() for each in self._ranks.mine]) / turns

    def bytes_per_token(self, position: int) -> int:
        """Bytes of weights, keys and values that the token at a position reads."""
        return bytes_per_token(self.config, position, self._ranks.mine[0].kv_item_bytes)

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
        ids, times = self._ids(prompt, room=1), [time.monotonic()]
        params = SamplingParams(max_tokens=max_tokens)
        pieces = list(self._pieces(ids, params, times, overlaps=overlaps))
        return [piece.id for piece in pieces], times

    @contextmanager
    def using(self, variant: Variant) -> Iterator[None]:
        """Meanwhile answers come from another decode kernel, to learn what costs how much. Their
        tokens may be wrong. Collective.

        Raises:
            InvalidArgument: The backend has no kernel.
            BackendError: The kernel cannot be compiled for this model.
        """
        try:
            with self._ranks.request(f"variant {variant}"):
                self._use(variant)
            yield
        finally:
            self._use(USUAL)

    def _use(self, variant: Variant) -> None:
        self._variant = variant
        for each in self._ranks.mine:
            each.use(variant)

    def timeline(self, prompt: str | Sequence[int], num_tokens: int) -> list[Timeline]:
        """What each rank's blocks do while tokens are generated: of so many tokens in a row, the
        second after the prompt being the first. Only where the ranks are threads.

        Raises:
            InvalidArgument: The backend has no kernel, or an argument is wrong.
        """
        # One round before those that are kept, and one behind them.
        rounds, ids = num_tokens + 2, self._ids(prompt)
        if not 1 <= num_tokens <= self.context - len(ids) - 2:
            raise kccl.InvalidArgument(
                f"num_tokens is {num_tokens}, must be from 1 to {self.context - len(ids) - 2}, for "
                f"which the context has room behind the prompt"
            )
        if len(self._ranks.mine) != self.world_size:
            raise kccl.InvalidArgument("timeline needs ranks that are threads of one process")
        # The cache must be that of a request as long as this one.
        self.timed(ids, rounds)
        out: list[Stamps] = []
        with (
            self.using(TRACING),
            self._ranks.request(f"timeline {ids}", len(ids) - 1) as (start, _),
        ):
            self._cached = ids[:start]
            for each in self._ranks.mine:
                each.start_timeline(ids, start, rounds, out)
            for each in self._ranks.mine:
                each.wait()
        return timelines(sorted(out, key=lambda stamps: stamps.rank))
