"""Computes when each block of a kernel did what, from the stamps of a kernel that traces
(kernels/trace.cuh).

A block's stamps count the ticks of its multiprocessor's clock. At the beginning of each token step,
a block records both ticks and the GPU's nanoseconds. From these pairs follow how long a tick is and
when the block's tick clock was zero. So times of one GPU are comparable to within a step of its
nanosecond clock. Times of several GPUs are comparable only as far as their nanosecond clocks agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.core import lib

Array = NDArray[Any]

# The indices of an op's stamps, times that a block records: see KcclDecodeStamp.
BEGAN: int = lib.kKcclDecodeBegan
ARRIVED: int = lib.kKcclDecodeArrived
MULTIPLIED: int = lib.kKcclDecodeMultiplied
MET: int = lib.kKcclDecodeMet
FINISHED: int = lib.kKcclDecodeFinished
NUM_STAMPS: int = lib.kKcclDecodeNumStamps
# The indices of the stamps of a stage of weights: see KcclDecodeStageStamp.
ASKED: int = lib.kKcclDecodeAsked
LANDED: int = lib.kKcclDecodeLanded
LET_GO: int = lib.kKcclDecodeLetGo
NUM_STAGE_STAMPS: int = lib.kKcclDecodeNumStageStamps


class Phase(NamedTuple):
    """A phase of an op: the work of a block between two stamps."""

    name: str
    begin: int
    end: int


_PHASES = (
    Phase("wait", BEGAN, ARRIVED),
    Phase("multiply", ARRIVED, MULTIPLIED),
    Phase("meet", MULTIPLIED, MET),
    Phase("finish", MET, FINISHED),
)
# The phases at the end of a token step: a block finds the best of its own logits, waits for all
# blocks of all ranks, and writes the choice for the host.
_PHASES_OF_END = (
    Phase("finish", BEGAN, ARRIVED),
    Phase("wait", ARRIVED, MULTIPLIED),
    Phase("finish", MULTIPLIED, FINISHED),
)
PHASES = tuple(phase.name for phase in _PHASES)
"""Names of what a block does in an op, in their order."""


class TracedOp(NamedTuple):
    """An op that has stamps. The last norm and the head together are one traced op. The end of a
    token step is one, too.

    Attributes:
        kind: Op.kind of program.py; or "end", in which all blocks agree on the next token.
        layer: The layer. -1 for the head and for the end.
    """

    kind: str
    layer: int

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Returns the phases of a block in this op, in order."""
        return _PHASES_OF_END if self.kind == "end" else _PHASES


@dataclass(frozen=True, eq=False)
class Layout:
    """The meaning of the stamps of a token step.

    Attributes:
        ops: The traced ops, in their order.
        stage_ops: int [stage][block]: the index in `ops` of the op that multiplies this stage of
            the block. -1 means that the block has no such stage.
        stage_bytes: int [stage][block]: the bytes of the block's stage.
        of_token_step: The number of stamps of a block in a token step.
        ring_stages: The number of stages that a block's ring has room for.
        num_lane_groups: The number of residuals of the rank. Block b works on residual
            b % num_lane_groups.
    """

    ops: tuple[TracedOp, ...]
    stage_ops: Array
    stage_bytes: Array
    of_token_step: int
    ring_stages: int
    num_lane_groups: int

    @property
    def num_blocks(self) -> int:
        return int(self.stage_ops.shape[1])

    def by_group(self) -> list[int]:
        """Returns the blocks, sorted by the residual that they work on."""
        return sorted(range(self.num_blocks), key=lambda block: block % self.num_lane_groups)


@dataclass(frozen=True, eq=False)
class Stamps:
    """The stamps that a rank's kernel wrote: uint64 [token step][stamp][block]. 0: the block did
    not reach the point of this stamp.
    """

    rank: int
    layout: Layout
    values: Array

    @classmethod
    def of(cls, rank: int, layout: Layout, data: bytes) -> "Stamps":
        """Makes the stamps from the bytes that the kernel has written."""
        shape = (-1, layout.of_token_step, layout.num_blocks)
        return cls(rank, layout, np.frombuffer(data, np.uint64).reshape(shape))


@dataclass(frozen=True, eq=False)
class Timeline:
    """The times of a rank's token steps, in nanoseconds since the first kept token step began on
    the rank that was first.

    The ops of the first and the last traced token step are not kept: the first began with an empty
    ring, and the last one's beginning is only used as the end of the one before. The stages of both
    are kept, because stages are copied ahead of the token step that multiplies them.

    Attributes:
        rank: The rank.
        layout: What its stamps mean.
        begins: [kept token steps + 1]: when the blocks began each kept token step, on average. The
            last element is the end of the last one.
        ops: [kept token step][op][stamp][block]. NaN if the stamp was not reached.
        stages: [traced token step][stage][stage stamp][block]. NaN if the stage does not exist. The
            producer warp may notice late that a stage has landed. If its block let it go before
            that, LANDED is the time of LET_GO.
        ns_per_tick: Nanoseconds per tick of the multiprocessors' clocks.
        clock_error_ns: The largest difference between the nanoseconds that a block recorded at the
            beginning of a token step and those that its ticks give.
    """

    rank: int
    layout: Layout
    begins: Array
    ops: Array
    stages: Array
    ns_per_tick: float
    clock_error_ns: float

    @property
    def num_token_steps(self) -> int:
        return len(self.begins) - 1

    @property
    def window(self) -> tuple[float, float]:
        """Returns when the kept token steps began and ended."""
        return float(self.begins[0]), float(self.begins[-1])

    @property
    def token_step_ns(self) -> float:
        """Returns the mean time of a kept token step."""
        begin, end = self.window
        return (end - begin) / self.num_token_steps

    def flat_stages(self) -> tuple[Array, Array, Array]:
        """Returns all blocks' stages, of all traced token steps, as flat arrays: times [stage
        stamp][stage], bytes [stage] and blocks [stage]. Leaves out stages that lack a stamp.
        """
        is_there = ~np.isnan(self.stages).any(axis=2)
        steps, numbers, blocks = np.nonzero(is_there)
        times = self.stages[steps, numbers, :, blocks].T
        return times, self.layout.stage_bytes[numbers, blocks], blocks


def timelines(ranks: Sequence[Stamps]) -> list[Timeline]:
    """Returns the timelines of ranks that ran the same token steps. There must be at least three
    token steps.
    """
    origins = [int(each.values[1, -1].min()) for each in ranks]
    return [_timeline(each, min(origins)) for each in ranks]


def _timeline(stamps: Stamps, origin_ns: int) -> Timeline:
    layout, values = stamps.layout, stamps.values
    # Subtracts before the conversion to float64. Unlike the stamps, their differences are small
    # enough to be exact in float64.
    first = values[0, -2].astype(np.int64)
    ticks = np.where(values[:, :-2] == 0, np.nan, (values[:, :-2].astype(np.int64) - first))
    begin_ticks = values[:, -2].astype(np.int64) - first
    begin_ns = values[:, -1].astype(np.int64) - origin_ns
    ns_per_tick = float((begin_ns[-1] - begin_ns[0]).sum() / (begin_ticks[-1]).sum())
    zeros = begin_ns - begin_ticks * ns_per_tick
    zero = zeros.mean(axis=0)
    times = ticks * ns_per_tick + zero
    split = len(layout.ops) * NUM_STAMPS
    num, _, blocks = times.shape
    ops = times[1:-1, :split].reshape(num - 2, len(layout.ops), NUM_STAMPS, blocks)
    stages = times[:, split:].reshape(num, -1, NUM_STAGE_STAMPS, blocks)
    stages[:, :, LANDED] = np.fmin(stages[:, :, LANDED], stages[:, :, LET_GO])
    begins = (begin_ticks * ns_per_tick + zero).mean(axis=1)[1:]
    error = float(np.abs(zeros - zero).max())
    return Timeline(stamps.rank, layout, begins, ops, stages, ns_per_tick, error)


def level(begins: Array, ends: Array, at: Array) -> Array:
    """Returns, for each time in `at`, how many of the intervals [begin, end) contain it."""
    return np.searchsorted(np.sort(begins), at, "right") - np.searchsorted(
        np.sort(ends), at, "right"
    )


def covered(begins: Array, ends: Array, window: tuple[float, float]) -> float:
    """Returns how much of the window is covered by at least one of the intervals [begin, end)."""
    order = np.argsort(begins)
    begins = np.clip(begins[order], *window)
    # The latest end of the intervals so far.
    ends = np.maximum.accumulate(np.clip(ends[order], *window))
    lasts = np.concatenate([[window[0]], ends[:-1]])
    return float(np.maximum(ends - np.maximum(begins, lasts), 0).sum())
