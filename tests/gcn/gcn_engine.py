"""The engine's kernels on the machine of gcn_machine.py: ranks with weights, exchange buffers and
the simulator beside them, which adds up as AMD's matrix units do.
"""

import ctypes
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from gcn_machine import SOURCES, Launch, Program, Report
from gcn_world import World, compiled
from kernel_copies import copy_kernels

import kccl
from kccl.engine.base.core import ffi
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.model.program import Program as Model
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel import launching, loading
from kccl.engine.monokernel.layout import TILE
from kccl.engine.monokernel.memory import SimArena
from kccl.engine.monokernel.shape import Tuning
from kccl.engine.monokernel.source import KERNELS, source_of
from kccl.engine.monokernel.task import NO_LOGITS, id_and_end, new_task

WARP_SIZE = 64
# A compute unit's.
SHARED_BYTES = 64 << 10
_PACKERS = 8
# In the place of mma_loop.cuh, and what it includes.
_UNITS = Path(__file__).with_name("mma_units.cuh")
_MATRIX = SOURCES / "matrix.h"

Array = "np.ndarray[Any, Any]"


@dataclass(frozen=True)
class Answer:
    """What a request gives.

    Attributes:
        report: What the machine says.
        tokens: Those that each rank's host sees.
        logits: Each rank's, float32 [ids, vocab_size]; zeros unless they were asked for.
    """

    report: Report
    tokens: list[list[int]]
    logits: "list[Array]"


@dataclass(frozen=True)
class _Window:
    addresses: list[int]


class _Rank:
    """What loading needs of a communicator. Ranks load one after another."""

    def __init__(self, world: World, rank: int, windows: "list[list[Array]]") -> None:
        self.rank, self.world_size = rank, world.world_size
        self._world, self._windows, self._num = world, windows, 0

    def gather_objects(self, mine: Any) -> list[Any]:
        """All ranks have equally many lanes, and so the same."""
        return [mine]

    def window(self, nbytes: int) -> _Window:
        """The next one: rank 0 comes first, and allocates for all."""
        if self._num == len(self._windows):
            ranks = range(self.world_size)
            zeros = np.zeros(nbytes, np.uint8)
            self._windows.append([self._world.array(rank, zeros) for rank in ranks])
        parts = self._windows[self._num]
        assert parts[0].nbytes == nbytes
        self._num += 1
        return _Window([each.ctypes.data for each in parts])


class Decoder:
    """All ranks of a model."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        world_size: int,
        tuning: Tuning,
        context: int,
        *,
        samples: bool = False,
        edit: Callable[[str], str] = str,
    ) -> None:
        """Compiles the kernels, and runs those that pack the weights.

        Args:
            checkpoint: The model.
            world_size: Number of ranks; divides the lanes.
            tuning: How a GPU is used.
            context: Positions that the cache has room for.
            samples: Whether tokens are chosen as SamplingParams say.
            edit: Changes the body of the kernel that decodes.
        """
        self._model, self._tuning = Model(checkpoint.config, checkpoint.formats), tuning
        self._world = World(world_size)
        # That all prefills before made.
        self._passes = 0

        def program(samples: bool) -> Program:
            source = source_of(self._model, world_size, context, tuning, samples=samples)
            # Small shapes leave nothing to unroll in some loops that ask for it.
            return Program(compiled(source, f"-I{KERNELS}", "-Wno-pass-failed"))

        self._program = program(False)
        self._sizes = self._describe()
        windows: list[list[Any]] = []
        self._loaded = [
            self._load(_Rank(self._world, rank, windows), checkpoint, context)
            for rank in range(world_size)
        ]
        self._decodes = Program(edited(program(samples).assembly, edit))

    def _describe(self) -> loading.Sizes:
        out = self._world.array(0, np.zeros(loading.SIZES_BYTES, np.uint8))
        self._run(self._launch(0, self._program, "describe", _words(out.ctypes.data)))
        return loading.sizes_of(out.tobytes())

    def _load(self, comm: Any, checkpoint: Checkpoint, context: int) -> loading.Loaded:
        def pack(*place: int) -> None:
            arguments, blocks = _words(*place), self._tuning.blocks
            self._run(self._launch(comm.rank, self._program, "pack", arguments, blocks, _PACKERS))

        arena = SimArena(comm)
        return loading.load(
            checkpoint, self._model, comm, arena, self._sizes, context, pack, lambda nbytes: None
        )

    def _launch(
        self,
        rank: int,
        program: Program,
        name: str,
        arguments: bytes,
        blocks: int = 1,
        warps: int = 1,
        nbytes: int = 0,
    ) -> Launch:
        symbol = program.symbol(f"_Z{len(name)}{name}")
        return Launch(rank, program, symbol, arguments, blocks, warps * WARP_SIZE, nbytes)

    def _run(self, launch: Launch) -> None:
        report = self._world.run([launch])
        assert report.finding is None, report.finding

    def score(self, ids: Sequence[int], **more: Any) -> Answer:
        """The logits after each of the ids. more: for gcn_machine.run()."""
        return self._request(ids, None, **more)

    def generate(self, ids: Sequence[int], params: SamplingParams, **more: Any) -> Answer:
        """Tokens after the ids. more: for gcn_machine.run()."""
        return self._request(ids, params, **more)

    def _request(self, ids: Sequence[int], params: SamplingParams | None, **more: Any) -> Answer:
        launches = []
        for rank, loaded in enumerate(self._loaded):
            task, mailbox = loaded.task, loaded.mailbox
            ctypes.memmove(task.ids, np.asarray(ids, np.int32).ctypes.data, 4 * len(ids))
            task.num_ids, task.start = len(ids), 0
            task.token_step, task.exchange = mailbox.token_steps, mailbox.exchanges
            task.number += 1
            if params is None:
                task.max_tokens, task.logits = 0, loaded.logits
            else:
                task.max_tokens, task.logits = params.max_tokens, NO_LOGITS
                loaded.choices.give_to(task, params)
                launches += self._prefill(rank, task)
            arguments = self._world.comm_bytes(rank) + bytes(ffi.buffer(task))
            shape = (
                self._tuning.blocks,
                self._tuning.warps + self._tuning.others,
                self._sizes.shared,
            )
            launches.append(self._launch(rank, self._decodes, "decode", arguments, *shape))
        if params is not None:
            self._passes += -(-(len(ids) - 1) // self._tuning.chunk)
        report = self._world.run(launches, **more)
        vocab_size = self._model.config.vocab_size
        return Answer(
            report,
            [
                [id_and_end(token)[0] for token in each.tokens if token.number == each.task.number]
                for each in self._loaded
            ],
            [
                _read(each.logits[rank], 4 * len(ids) * vocab_size, np.float32).reshape(
                    -1, vocab_size
                )
                for rank, each in enumerate(self._loaded)
            ],
        )

    def _prefill(self, rank: int, task: Any) -> list[Launch]:
        """Lets all ids but the last run in chunks, if the tuning has them."""
        tuning, last = self._tuning, task.num_ids - 1
        if tuning.chunk == 1 or last == 0:
            return []
        chunks = new_task(task)
        chunks.num_ids = task.start = last
        chunks.token_step = self._passes
        arguments = self._world.comm_bytes(rank) + bytes(ffi.buffer(chunks))
        shape = tuning.blocks, tuning.chunk_warps + tuning.chunk_others, self._sizes.prefill_shared
        return [self._launch(rank, self._program, "prefill", arguments, *shape)]

    def memory(self) -> "list[dict[str, Array]]":
        """See memory_of(), of each rank."""
        return [
            memory_of(each.task, rank, self._sizes, self._model)
            for rank, each in enumerate(self._loaded)
        ]


def edited(assembly: str, edit: Callable[[str], str]) -> str:
    """Assembly with another body of the kernel that decodes."""
    begin = assembly.index("\n_Z6decode")
    end = assembly.index(".Lfunc_end", begin)
    return assembly[:begin] + edit(assembly[begin:end]) + assembly[end:]


def simulated(
    checkpoint: Checkpoint,
    world_size: int,
    tuning: Tuning,
    context: int,
    ids: Sequence[int],
    folder: Path,
) -> "list[tuple[Array, dict[str, Array]]]":
    """The logits after each of the ids, and the memory then, of each of the simulator's ranks.

    Args:
        checkpoint, world_size, tuning, context: As Decoder's.
        ids: What is scored.
        folder: For a copy of the kernels, with mma_units.cuh.
    """

    def main(comm: kccl.Communicator) -> "tuple[Array, dict[str, Array]]":
        executor = DeviceExecutor(
            checkpoint, comm, tuning=tuning, context=context, warp_size=WARP_SIZE
        )
        out = np.empty((len(ids), checkpoint.config.vocab_size), np.float32)
        executor.start_scoring(ids, out, writes_shared=True)
        executor.wait()
        sizes = executor._kernels.usual.sizes
        return out, memory_of(executor._task, comm.rank, sizes, executor.program)

    with _matrix_units(folder):
        return kccl.run_threads(
            main, world_size, backend="sim", warp_size=WARP_SIZE, model="gfx942"
        )


@contextmanager
def _matrix_units(folder: Path) -> Iterator[None]:
    kernels = copy_kernels(folder)
    shutil.copy(_UNITS, kernels / "targets/mma_loop.cuh")
    shutil.copy(_MATRIX, kernels)
    with patch.object(launching, "KERNELS", kernels):
        yield


def memory_of(task: Any, rank: int, sizes: loading.Sizes, model: Model) -> "dict[str, Array]":
    """What the kernels have left in a rank's memory, as words: packed weights, the cache, and the
    parts of the exchange buffer, which have all ops' vectors of the last position.
    """
    c, float4_bytes = model.config, 16
    router_rows = -(-c.experts.num // TILE) * TILE if c.experts else 0
    starts = {
        "residuals": sizes.slots.residuals,
        "messages": 2 * c.num_layers * model.num_residuals * c.hidden // 4,
        "qkv": sizes.slots.qkv,
        "attended": sizes.slots.attended,
        "acts": sizes.slots.acts,
        "routed": sizes.slots.routed,
        "ends": sizes.slots.routed + c.num_layers * router_rows // 4,
    }
    found = {
        "weights": _read(task.weights, sizes.weights, np.uint32),
        "cache": _read(task.cache, sizes.cache, np.uint32),
    }
    ends = [*list(starts.values())[1:], sizes.exchange_buffer // float4_bytes]
    for (name, start), end in zip(starts.items(), ends, strict=True):
        address = task.exchange_buffers[rank] + start * float4_bytes
        found[name] = _read(address, (end - start) * float4_bytes, np.uint32)
    return found


def _read(address: int, nbytes: int, dtype: Any) -> "Array":
    return np.frombuffer(ctypes.string_at(address, nbytes), dtype)


def _words(*values: int) -> bytes:
    return np.array(values, np.uint64).tobytes()
