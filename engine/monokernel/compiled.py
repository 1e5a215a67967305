"""Compiles the monokernel for one model and machine: the usual kernels, and decode kernels for
other variants and requests.
"""

from dataclasses import replace
from typing import Any

import kccl

from ..model.drafts import OFF, Drafts
from ..model.program import Program
from ..model.sample import SamplingParams
from ..model.variant import USUAL, Variant
from . import loading
from .choices import MOST_STOP_IDS, penalizes_answer
from .launching import Compiled, Launcher
from .memory import Arena
from .other_tuning import with_variant
from .shape import Tuning
from .source import kernels_of, source_of


class Kernels:
    """A rank's kernels. Compiles the usual ones at once, and others when they are first needed.

    All kernels use the same weights, KV cache and exchange buffer.

    Attributes:
        usual: The usual module, which has all kernels. Its decode kernel overlaps its work, and
            always chooses the most likely token.
    """

    def __init__(
        self,
        program: Program,
        comm: kccl.Communicator,
        launcher: Launcher,
        arena: Arena,
        tuning: Tuning,
        context: int,
    ) -> None:
        """Compiles the usual kernels.

        Args:
            program: The model's program.
            comm: The communicator of all ranks.
            launcher: Launches kernels on the rank's device.
            arena: The rank's memory.
            tuning: How the device is used.
            context: The positions that a slot of the KV cache has room for.

        Raises:
            BackendError: There is no compiler, or the compiler failed.
        """
        self._program, self._comm, self._tuning = program, comm, tuning
        self._launcher, self._arena = launcher, arena
        self._context = context
        self._numbers = arena.allocate(loading.SIZES_BYTES)
        # (variant, samples, overlaps, columns, has_seats) -> compiled module.
        self._known: dict[tuple[Variant, bool, bool, int, bool], Compiled] = {}
        self.usual = self.get()

    def columns_for(self, drafts: Drafts) -> int:
        """Returns the most positions that a token step runs: as the tuning says, or as many as a
        block has memory for on each rank. Ranks with more lanes may have it for fewer. Collective.

        Raises:
            InvalidArgument: That is too few for these drafts, or for the seats of the tuning.
        """
        fits = min(self._comm.gather_objects(self.usual.sizes.most_columns))
        if self._tuning.seats > fits:
            raise kccl.InvalidArgument(
                f"slots is {self._tuning.seats}, must be at most {fits} here: a block has shared "
                "memory for so many requests of this model"
            )
        columns: int = min(self._tuning.columns, fits)
        check_drafts(drafts, columns)
        return columns

    def has(
        self, variant: Variant, *, samples: bool = False, overlaps: bool = True, columns: int = 1
    ) -> bool:
        """Tells whether get() would find the kernels compiled."""
        return (variant, samples, overlaps, columns, False) in self._known

    def get(
        self,
        variant: Variant = USUAL,
        *,
        samples: bool = False,
        overlaps: bool = True,
        columns: int = 1,
        has_seats: bool = False,
    ) -> Compiled:
        """Returns the kernels of a variant, and compiles them first if needed. `samples`,
        `overlaps`, `columns` and `has_seats` are as in source_of().
        """
        key = variant, samples, overlaps, columns, has_seats
        if key not in self._known:
            tuning = with_variant(self._program, self._tuning, variant)
            text = source_of(
                self._program,
                self._comm.world_size,
                self._context,
                tuning,
                rank=self._comm.rank,
                samples=samples,
                traces=variant.traces,
                overlaps=overlaps,
                columns=columns,
                has_seats=has_seats,
            )
            names = kernels_of(tuning, traces=variant.traces)
            if samples or not overlaps or columns > 1:
                names = ["decode", "describe"]
            module = self._launcher.compile(text, names)
            sizes, squad_shared = self._sizes_of(module, "describe"), 0
            if "describe_squads" in names:
                of_squads = self._sizes_of(module, "describe_squads")
                squad_shared = of_squads.prefill_shared
                most = max(sizes.exchange_buffer, of_squads.exchange_buffer)
                sizes = sizes._replace(exchange_buffer=most)
            self._known[key] = Compiled(module, sizes, squad_shared)
        return self._known[key]

    def _sizes_of(self, module: Any, kernel: str) -> loading.Sizes:
        """Returns what a kernel of a module tells about its shape."""
        self._launcher.launch(module.kernel(kernel), self._numbers, grid=1, warps=1)
        self._launcher.wait()
        return loading.sizes_of(self._arena.read(self._numbers, loading.SIZES_BYTES))


def wants_sampling(params: SamplingParams) -> bool:
    """Tells whether a request needs the kernel that samples. The other kernel always chooses the
    most likely token, which leaves more registers for its other work.
    """
    penalizes = params.repetition_penalty != 1 or penalizes_answer(params)
    changes_scores = penalizes or bool(params.biases) or params.grammar is not None
    return params.temperature > 0 or changes_scores or params.logprobs


def check_sampling(params: SamplingParams) -> None:
    """Raises InvalidArgument if the kernel does not support a request's parameters: it has room for
    MOST_STOP_IDS stop ids.
    """
    num, most = len(params.stop_ids), MOST_STOP_IDS
    if num > most:
        raise kccl.InvalidArgument(f"stop_ids has {num} ids, must have at most {most}")


def check_drafts(drafts: Drafts, columns: int) -> None:
    """Raises InvalidArgument if the kernel cannot make these drafts: a token step runs up to
    `columns` positions, the last token's and one for each draft.
    """
    if drafts.drafter is not None:
        raise kccl.InvalidArgument(
            "the monokernel takes no drafts from a drafter in Python; backend 'host' does"
        )
    if drafts.adapts or drafts.most < columns:
        return
    allowed = f"at most {columns - 1}" if columns > 1 else "'off' or 'auto'"
    positions = f"up to {columns} positions" if columns > 1 else "one position"
    raise kccl.InvalidArgument(
        f"drafts is {drafts.most}, must be {allowed}: a token step runs {positions} here"
    )


def used_drafts(drafts: Drafts, params: SamplingParams, columns: int) -> Drafts:
    """Returns the drafts that a request makes, at most one for each column but the first. A request
    with a grammar makes none.

    Raises:
        InvalidArgument: The kernel cannot make these drafts.
    """
    check_drafts(drafts, columns)
    if drafts.most == 0 or params.grammar is not None:
        return OFF
    return replace(drafts, most=min(drafts.most, columns - 1))
