"""Computes when each block of a kernel did what, from the stamps of a kernel that traces
(kernels/trace.cuh).

A block's stamps count the ticks of its multiprocessor. The two stamps at the beginning of each
token step, ticks and nanoseconds, tell how long a tick is and when the block's clock was zero. So
times of one GPU are comparable to within a step of its nanosecond clock. Times of several GPUs are
comparable as far as these clocks agree, because nothing else is known of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.core import lib

Array = NDArray[Any]

# KcclDecodeStamp, of an op.
BEGAN: int = lib.kKcclDecodeBegan
ARRIVED: int = lib.kKcclDecodeArrived
MULTIPLIED: int = lib.kKcclDecodeMultiplied
MET: int = lib.kKcclDecodeMet
FINISHED: int = lib.kKcclDecodeFinished
NUM_STAMPS: int = lib.kKcclDecodeNumStamps
# KcclDecodeStageStamp, of a stage.
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
# At the end a block chooses among its own logits, waits for all blocks of all ranks, and tells the
# host.
_PHASES_OF_END = (
    Phase("finish", BEGAN, ARRIVED),
    Phase("wait", ARRIVED, MULTIPLIED),
    Phase("finish", MULTIPLIED, FINISHED),
)
PHASES = tuple(phase.name for phase in _PHASES)
"""Names of what a block does in an op, in their order."""


class TracedOp(NamedTuple):
    """An op that has stamps. The last norm and the head count as one op, and so does the end of a
    token step.

    Attributes:
        kind: As Op.kind in program.py; or "end": all blocks agree on the next token.
        layer: The layer; -1 for the head and for the end.
    """

    kind: str
    layer: int

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Returns the phases of a block in it, in order."""
        return _PHASES_OF_END if self.kind == "end" else _PHASES


@dataclass(frozen=True, eq=False)
class Layout:
    """The meaning of the stamps of a token step.

    Attributes:
        ops: The traced ops, in their order.
        stage_ops: int [stage][block]: the op that multiplies the block's stage; -1: the block has
            no such stage.
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
    """The stamps of a rank's kernel: uint64 [token step][stamp][block]. 0 stands for a point that
    was not reached.
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
    """A rank's token steps, in nanoseconds since the first kept one began on any rank.

    The first token step that was traced filled an empty ring, and the last one only tells when the
    one before ended. Neither is kept. Their stages are, because stages are copied ahead.

    Attributes:
        rank: The rank.
        layout: What its stamps mean.
        begins: [kept token step + 1]: when the blocks began it, on average; the last one is the
            end.
        ops: [kept token step][op][stamp][block]; NaN: not reached.
        stages: [traced token step][stage][stage stamp][block]; NaN: there is none. A stage that its
            block let go before the copying warp saw it land counts as landed then.
        ns_per_tick: Nanoseconds of a tick of the multiprocessors' clocks.
        clock_error_ns: The most by which a block's begin stamps differ from its clock.
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
        """Returns the stages of all token steps that exist and were let go of: times [stage
        stamp][stage], bytes [stage] and blocks [stage].
        """
        is_there = ~np.isnan(self.stages).any(axis=2)
        steps, numbers, blocks = np.nonzero(is_there)
        times = self.stages[steps, numbers, :, blocks].T
        return times, self.layout.stage_bytes[numbers, blocks], blocks


def timelines(ranks: Sequence[Stamps]) -> list[Timeline]:
    """Returns the timelines of ranks that ran the same token steps, at least three."""
    origins = [int(each.values[1, -1].min()) for each in ranks]
    return [_timeline(each, min(origins)) for each in ranks]


def _timeline(stamps: Stamps, origin_ns: int) -> Timeline:
    layout, values = stamps.layout, stamps.values
    # Differences of integers are taken first: they are small, so float64 holds them exactly.
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
    """Returns how many of the intervals [begin, end) contain each time."""
    return np.searchsorted(np.sort(begins), at, "right") - np.searchsorted(
        np.sort(ends), at, "right"
    )


def covered(begins: Array, ends: Array, window: tuple[float, float]) -> float:
    """Returns for how long at least one of the intervals runs."""
    order = np.argsort(begins)
    begins = np.clip(begins[order], *window)
    # The latest end of the intervals so far.
    ends = np.maximum.accumulate(np.clip(ends[order], *window))
    lasts = np.concatenate([[window[0]], ends[:-1]])
    return float(np.maximum(ends - np.maximum(begins, lasts), 0).sum())
