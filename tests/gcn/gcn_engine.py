"""The decode kernel of the engine on the machine of gcn_machine.py: ranks with weights, boards and
caches, and requests.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from gcn_machine import Launch, Program, Report
from gcn_world import World, compiled

from kccl.engine.checkpoint import Checkpoint
from kccl.engine.monokernel import loading
from kccl.engine.monokernel.memory import SimArena
from kccl.engine.monokernel.shape import KERNELS, Tuning, source_of
from kccl.engine.program import Program as Model

# As clang's default for HIP rounds: products and sums may be one step.
WARP_SIZE = 64
_PACKERS = 8


@cache
def engine_assembly(source: str, *options: str) -> str:
    """The assembly of a source of shape.py."""
    # The smallest shapes leave nothing to unroll in a loop that is to be unrolled.
    return compiled(source, f"-I{KERNELS}", "-Wno-pass-failed", *options)


class _Rank:
    """What loading needs of a communicator."""

    def __init__(self, world: World, rank: int, windows: list[list[np.ndarray]]) -> None:
        self.world, self.rank, self.world_size = world, rank, world.world_size
        self._windows, self._num = windows, 0

    def gather_objects(self, mine: Any) -> list[Any]:
        """All ranks have the same."""
        return [mine]

    def window(self, nbytes: int) -> "_Window":
        if self._num == len(self._windows):
            size = max(nbytes, 8)
            self._windows.append(
                [
                    self.world.array(rank, np.zeros(size, np.uint8))
                    for rank in range(self.world_size)
                ]
            )
        window = self._windows[self._num]
        assert window[0].nbytes == max(nbytes, 8)
        self._num += 1
        return _Window([each.ctypes.data for each in window])


@dataclass(frozen=True)
class _Window:
    addresses: list[int]


@dataclass(frozen=True)
class Answer:
    """A request's outcome.

    Attributes:
        report: What the machine says.
        tokens: Of each rank: the tokens that its host sees.
        logits: Of each rank: float32 [ids, vocab_size], if they were asked for.
    """

    report: Report
    tokens: list[list[int]]
    logits: list[np.ndarray]


class Decoder:
    """All ranks of a model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        world_size: int,
        tuning: Tuning,
        context: int,
        options: Sequence[str] = (),
        program: Program | None = None,
    ) -> None:
        self.world = World(world_size)
        self._model = Model(checkpoint.config)
        self._tuning, self._context = tuning, context
        source = source_of(self._model, world_size, context, tuning, checkpoint.dtype)
        self.program = program or Program(engine_assembly(source, *options))
        self._sizes = self._describe()
        windows: list[list[np.ndarray]] = []
        self._ranks = []
        for rank in range(world_size):
            comm = _Rank(self.world, rank, windows)
            arena = SimArena(comm)  # type: ignore[arg-type]

            def pack(*place: int, rank: int = rank) -> None:
                arguments = np.array(place, np.uint64).tobytes()
                self._run([self._launch(rank, "pack", arguments, tuning.blocks, _PACKERS)])

            self._ranks.append(
                loading.load(
                    checkpoint, self._model, comm, arena, self._sizes, context, pack, lambda n: None
                )
            )

    def _describe(self) -> loading.Sizes:
        out = self.world.array(0, np.zeros(loading.SIZES_BYTES, np.uint8))
        address = np.array([out.ctypes.data], np.uint64).tobytes()
        self._run([self._launch(0, "describe", address, 1, 1)])
        return loading.sizes_of(out.tobytes())

    def _launch(
        self, rank: int, name: str, arguments: bytes, grid: int, warps: int, shared: int = 0
    ) -> Launch:
        symbol = self.program.symbol(f"_Z{len(name)}{name}")
        block = warps * WARP_SIZE
        return Launch(rank, self.program, symbol, arguments, grid, block, shared)

    def _run(self, launches: list[Launch]) -> None:
        report = self.world.run(launches)
        assert report.finding is None, report.finding

    def answer(
        self, ids: Sequence[int], *, max_tokens: int = 0, scores: bool = False, **more: Any
    ) -> Answer:
        launches = []
        for rank, loaded in enumerate(self._ranks):
            task = loaded.task
            ctypes.memmove(task.ids, np.asarray(ids, np.int32).ctypes.data, 4 * len(ids))
            task.num_ids, task.start, task.max_tokens = len(ids), 0, max_tokens
            task.round, task.exchange = loaded.mailbox.rounds, loaded.mailbox.exchanges
            task.number += 1
            task.logits = type(task.logits)(*(loaded.logits if scores else ()))
            arguments = self.world.comm_bytes(rank) + bytes(task)
            warps = self._tuning.warps + self._tuning.others
            launches.append(
                self._launch(
                    rank, "decode", arguments, self._tuning.blocks, warps, self._sizes.shared
                )
            )
        report = self.world.run(launches, **more)
        number = self._ranks[0].task.number
        tokens = [
            [int(each.id) for each in loaded.tokens if each.number == number]
            for loaded in self._ranks
        ]
        vocab = self._model.config.vocab_size
        logits = [
            np.frombuffer(ctypes.string_at(loaded.logits[rank], 4 * len(ids) * vocab), np.float32)
            .reshape(len(ids), vocab)
            for rank, loaded in enumerate(self._ranks)
        ]
        return Answer(report, tokens, logits)
