"""`kccl bench <collective> --in-kernel`: calls inside persistent kernels as contenders.

A collective has one or more forms (harness/forms.py). A launch makes thousands of calls, each of
which depends on the one before. The result of each launch is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..gpu.clock import delays_ns
from ..gpu.kernels import LINE_BYTES
from ..harness.collective import Collective
from ..harness.forms import DELAYS_ALONE, NOTES, Form
from ..harness.measure import Contender
from ..harness.problem import Array, Buffers, Comm, Problem

CHECKED = 8
"""Checked calls at the end of a barrier's launch."""

_WARP, _THREADS = 32, 128
_PAYLOAD_BYTES, _UNIT_BYTES = 8, 16
# The most calls of a kEach or kSkewed launch. They suffice for a 99th percentile and random delays.
MOST_NOTED = 2000
_SKEWED_SHARE = 4


def forms(collective: Collective, world_size: int) -> list[Form]:
    """Returns the forms at a world size. With one rank, only those within a GPU, if there are
    any.
    """
    within = [form for form in collective.forms if form.is_within]
    return within if world_size == 1 and within else list(collective.forms)


class Runner(Protocol):
    """Where kernels run: a GPU or the simulator.

    Attributes:
        comm: The communicator.
        most_blocks: Number of blocks that are certain to be co-resident.
        has_clock: Whether times are those of a real machine, and not of the simulator.
    """

    comm: Comm
    most_blocks: int
    has_clock: bool

    def compile(self, source: Any, names: Sequence[str], folders: Sequence[Path] = ()) -> Any:
        """Compiles a module; `folders` are additional include folders."""

    def buffers(self, problem: Problem) -> Buffers:
        """Returns arrays for a form's calls. Collective."""

    def numbers(self, values: Array) -> Any:
        """Returns a new array of 32- or 64-bit integers. Collective."""

    def address(self, array: Any) -> int:
        """Returns the address of an array of numbers()."""

    def read(self, array: Any, count: int, dtype: Any) -> Array:
        """Returns the first elements of an array of numbers(), after the kernels have ended."""

    def launch(self, kernel: Any, *args: Any, grid: int, block: int, shared_bytes: int = 0) -> None:
        """Launch a kernel; `args` are its arguments without the communicator."""

    def launch_cooperative(self, kernel: Any, *args: Any, grid: int, block: int) -> None:
        """Does what launch() does, by the driver's cooperative launch."""

    def wait(self) -> None:
        """Wait for the kernels; raises kccl.Error if one failed."""

    def probe(self, *, within: bool) -> Callable[[], float | None]:
        """Returns a function that measures the one-way latency of a word in microseconds.

        The word goes between two blocks of a GPU if `within`, else between ranks 0 and 1. The
        function returns None on the simulator. Both this call and that function are collective.
        """


@dataclass(frozen=True)
class Shape:
    """How a message is divided: `each` elements per block, about one packet per thread."""

    blocks: int
    threads: int
    each: int


def shape(problem: Problem, most_blocks: int) -> Shape:
    """Returns the shape of a problem's launch. A barrier has one block, grid_sync `most_blocks`."""
    if problem.np_dtype is None:
        if problem.collective != "grid_sync":
            return Shape(1, _WARP, 0)
        # Each thread polls the signal of one block. So a block has at least as many threads as the
        # grid has blocks, rounded up to whole warps.
        return Shape(most_blocks, -(-most_blocks // _WARP) * _WARP, 0)
    nbytes = problem.nbytes // problem.num_chunks
    payloads = -(-nbytes // _PAYLOAD_BYTES)
    threads = min(-(-payloads // _WARP) * _WARP, _THREADS)
    blocks = min(-(-payloads // threads), most_blocks)
    units = -(-nbytes // _UNIT_BYTES)
    share = -(-units // blocks)
    return Shape(-(-units // share), threads, share * _UNIT_BYTES // problem.np_dtype.itemsize)


class Notebook:
    """The arrays that all forms of a run share: delays, and times that kernels record."""

    def __init__(self, runner: Runner, module: Any, participants: int, own: int | None) -> None:
        """Makes the object. Collective.

        Args:
            runner: Where the kernels run.
            module: A module with the kernel DELAYS_ALONE.
            participants: Number of ranks or blocks, of which one at a time is late.
            own: This rank's index among them; None if they are the blocks of its GPU.
        """
        schedule = delays_ns(MOST_NOTED, participants, 0)
        mine = schedule.ravel() if own is None else schedule[own]
        self.runner = runner
        self.delays = runner.numbers(mine)
        self.delay_stride = np.uint64(MOST_NOTED if own is None else 0)
        self.times = runner.numbers(np.zeros(runner.most_blocks * (MOST_NOTED + 1), np.int64))
        self._everyones = runner.numbers(schedule.sum(axis=0, dtype=np.int32))
        self._alone = module.kernel(DELAYS_ALONE)

    def alone_ns(self, count: int) -> float:
        """Measures the first `count` delays of all participants, one after another and without
        calls. Returns nanoseconds.
        """
        runner = self.runner
        runner.launch(
            self._alone, self._everyones, np.uint32(count), self.times, grid=1, block=_WARP
        )
        runner.wait()
        return float(runner.read(self.times, 1, np.int64)[0])


class InKernel:
    """One form on one problem. Wrong elements are counted until wrong() is called.

    Attributes:
        notebook: The arrays for delays and times.
        shape: The shape of the launches.
    """

    def __init__(self, notebook: Notebook, kernels: Sequence[Any], shape: Shape) -> None:
        self.notebook = notebook
        self.shape = shape
        self._kernels = dict(zip(NOTES, kernels, strict=True))
        self._wrong = 0

    def run(self) -> None:
        """Makes one call, for the collective's own check."""
        raise NotImplementedError

    def launch(self, kernel: Any, warmup: int, calls: int) -> int:
        """Launches a kernel, waits for it and checks it. Returns the number of wrong elements."""
        raise NotImplementedError

    def time(self, iterations: int, warmup: int) -> tuple[Array, Array]:
        """Returns the times of Contender.clock: the mean microseconds of a call on the slowest
        block, and the microseconds of every single call on all blocks.
        """
        self._launch("kMean", warmup, iterations)
        mean_us = self._times(self.shape.blocks).max() / iterations / 1e3
        noted = min(iterations, MOST_NOTED)
        self._launch("kEach", warmup, noted)
        began_ns = self._times(self.shape.blocks * (noted + 1)).reshape(-1, noted + 1)
        return np.array([mean_us]), np.diff(began_ns).ravel() / 1e3

    def skewed_us(self, iterations: int) -> float:
        """Returns the microseconds per call since the last arrival, if one random participant is
        late in each call.
        """
        noted = max(min(iterations // _SKEWED_SHARE, MOST_NOTED), 1)
        self._launch("kSkewed", max(noted // 10, 5), noted)
        with_calls_ns = float(self._times(self.shape.blocks).max())
        return (with_calls_ns - self.notebook.alone_ns(noted)) / noted / 1e3

    def wrong(self) -> int:
        """Returns the number of wrong elements in all launches since the last wrong()."""
        wrong, self._wrong = self._wrong, 0
        return wrong

    def _launch(self, notes: str, warmup: int, calls: int) -> None:
        # Makes the number of calls odd, so that an all_gather, which alternates between `x` and
        # `out`, ends in `out`.
        warmup += (warmup + calls + 1) % 2
        self._wrong += self.launch(self._kernels[notes], warmup, calls)

    def _times(self, count: int) -> Array:
        return self.notebook.runner.read(self.notebook.times, count, np.int64)

    def _noted(self) -> tuple[Any, ...]:
        """Returns the kernel arguments for the delays and the times."""
        return self.notebook.delays, self.notebook.delay_stride, self.notebook.times


class BarrierForm(InKernel):
    """A barrier or grid_sync. Each launch ends with checked calls: after such a call each
    participant reads the words that the others wrote before it.
    """

    def __init__(
        self, notebook: Notebook, kernels: Sequence[Any], shape: Shape, device_comm: Any | None
    ) -> None:
        """Makes the object. Collective.

        Args:
            notebook, kernels, shape: See InKernel.
            device_comm: None for kernels that have no such argument and are launched cooperatively.
        """
        super().__init__(notebook, kernels, shape)
        runner = notebook.runner
        self._device_comm = device_comm
        self._number = 0
        self._late = runner.numbers(np.zeros(shape.blocks * shape.threads, np.int32))
        if shape.blocks > 1:
            # All blocks of this GPU share one board. (chains.cuh says what a board is.)
            words = runner.numbers(np.zeros(shape.blocks * LINE_BYTES // 4, np.int32))
            self._keep, addresses, self._own = words, [runner.address(words)], 0
        else:
            window = runner.comm.window(runner.comm.world_size * LINE_BYTES)
            self._keep, addresses, self._own = window, window.addresses, runner.comm.rank
        self._boards = runner.numbers(np.array(addresses, np.int64))
        self._num_boards = len(addresses)

    def run(self) -> None:
        """See InKernel."""
        self._launch("kMean", 0, 1)

    def launch(self, kernel: Any, warmup: int, calls: int) -> int:
        """See InKernel."""
        runner, shape = self.notebook.runner, self.shape
        boards = self._boards, np.uint32(self._num_boards), np.uint32(self._own)
        args = (
            *map(np.uint32, (warmup, calls, CHECKED)),
            *(*boards, np.uint32(self._number), *self._noted(), self._late),
        )
        self._number += CHECKED
        if self._device_comm is None:
            runner.launch_cooperative(kernel, *args, grid=shape.blocks, block=shape.threads)
        else:
            runner.launch(kernel, self._device_comm, *args, grid=shape.blocks, block=shape.threads)
        runner.wait()
        return int(runner.read(self._late, shape.blocks * shape.threads, np.int32).sum())


def contender(
    collective: Collective, problem: Problem, form: Form, made: InKernel, buffers: Buffers
) -> Contender:
    """Returns the contender of one form.

    Args:
        collective: The table of functions.
        problem: The problem.
        form: The form.
        made: The form's launches.
        buffers: The arrays that they use; a barrier uses none.
    """
    is_alone = problem.world_size == 1 and made.shape.blocks == 1
    has_skewed_run = collective.waits_for_all and not is_alone and made.notebook.runner.has_clock
    return Contender(
        *(form.library, form.algorithm, "in_kernel", "open", buffers, made.run, made.time),
        further={"skewed_us": made.skewed_us} if has_skewed_run else {},
        complete=form.complete,
        order=form.order,
        blocks=made.shape.blocks,
        world_size=1 if form.is_within else None,
        wrong=made.wrong,
    )
