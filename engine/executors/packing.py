"""One rank's part of a model's weights, packed for the host executor in the order of its ops.

engine/host/products.h says what a panel is. Rows of queries and keys are reordered so that the
pairs that RoPE turns lie side by side; products of queries and keys do not change by that.
"""

import errno
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.core import ffi, lib
from ..files.checkpoint import Checkpoint
from ..files.vectors import norms_of
from ..model.config import is_vector
from ..model.ops import KINDS, Rows, Vector
from ..model.program import Op, Program
from ..model.rotations import pair_order

ROWS: int = lib.kKcclEnginePanelRows
# "embedding" and "head" are too large to be read at once.
PANELS_AT_ONCE = 32
_HUGE_PAGE = 2 << 20

Progress = Callable[[int], None]
"""Called with the number of bytes that were packed since the last call."""


def number_of(op: Op) -> int:
    """The executor's number of an op's kind: KcclEngineKind."""
    name = "kKcclEngine" + op.kind.title().replace("_", "")
    return int(getattr(lib, name))


def panels_for(num_rows: int) -> int:
    """Panels of a matrix with so many rows."""
    return -(-num_rows // ROWS)


class Parts:
    """How lanes, panels of the head and rows of the embedding are spread over the ranks.

    Attributes:
        first_lane, first_panel, first_row: Of each rank, then the total.
        num_groups: See Program.num_head_parts.
        panels_per_group: Panels of one of them.
    """

    def __init__(self, program: Program, world_size: int) -> None:
        c = program.config
        self.num_groups = program.num_head_parts
        self.panels_per_group = panels_for(c.vocab_size // self.num_groups)

        def cut(total: int) -> list[int]:
            return [total * rank // world_size for rank in range(world_size + 1)]

        of_ranks = [program.lanes_of(rank, world_size) for rank in range(world_size)]
        self.first_lane = [*(lanes.start for lanes in of_ranks), c.num_lanes]
        self.first_row = cut(c.vocab_size)
        self.first_panel = cut(self.panels_per_group)
        if self.num_groups > 1:
            # A lane's logits come from its own residual, which only its rank has.
            self.first_panel = [lane * self.panels_per_group for lane in self.first_lane]


def shape_of(program: Program, parts: Parts) -> Any:
    """A KcclEngineModel with the model's sizes, and nothing else."""
    c, lanes = program.config, program.config.num_lanes
    model = ffi.new("KcclEngineModel *")
    fields = {
        "num_ops": len(program.ops),
        "num_layers": c.num_layers,
        "num_lanes": lanes,
        "num_residuals": program.num_residuals,
        "num_in_flight": program.num_in_flight,
        "hidden": c.hidden,
        "heads": c.num_heads // lanes,
        "kv_heads": c.num_kv_heads // lanes,
        "ffn": c.ffn // lanes,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "num_head_groups": parts.num_groups,
        "rounds_messages": c.message_dtype == "bfloat16",
        "norm_eps": c.norm_eps,
        "attention_scale": c.attention_scale,
    }
    for name, value in fields.items():
        setattr(model, name, value)
    for name in ("first_lane", "first_panel", "first_row"):
        for rank, value in enumerate(getattr(parts, name)):
            getattr(model, name)[rank] = value
    return model


class Sizes:
    """How large the packed weights of one rank are, in bytes.

    Attributes:
        panel: Op index -> of one of its panels; 0 if the op has no weights.
        lane: Op index -> of one lane's panels.
        op: Op index -> of all that the rank has.
        embedding: Of the rank's rows.
        total: Of all of these.
    """

    def __init__(self, program: Program, parts: Parts, rank: int) -> None:
        model = shape_of(program, parts)
        lanes = parts.first_lane[rank + 1] - parts.first_lane[rank]
        panels_of_head = parts.first_panel[rank + 1] - parts.first_panel[rank]
        self.panel: dict[int, int] = {}
        self.lane: dict[int, int] = {}
        self.op: dict[int, int] = {}
        panels, columns = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        for op in program.ops:
            lib.kccl_engine_matrix(model, number_of(op), panels, columns)
            panel = 2 * int(lib.kccl_engine_panel_elements(columns[0]))
            self.panel[op.index] = panel
            self.lane[op.index] = panels[0] * panel
            num = panels_of_head if op.kind == "head" else lanes * panels[0]
            self.op[op.index] = num * panel
        rows = parts.first_row[rank + 1] - parts.first_row[rank]
        self.embedding = 2 * rows * program.config.hidden
        self.total = self.embedding + sum(self.op.values())


class PackedWeights:
    """The packed weights of one rank, the norms and the biases.

    Attributes:
        nbytes: Of the panels.
        address_of: Op index -> address of its panels; 0 where the rank has none.
        norms: See norms_of().
        biases: Index of an op that has biases -> float32 array, as api.inc has it.
    """

    def __init__(
        self, checkpoint: Checkpoint, program: Program, parts: Parts, rank: int, progress: Progress
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._lanes = range(parts.first_lane[rank], parts.first_lane[rank + 1])
        self._panels = range(parts.first_panel[rank], parts.first_panel[rank + 1])
        self._parts = parts
        self._sizes = Sizes(program, parts, rank)
        self._order = pair_order(
            self._config.head_dim, is_interleaved=self._config.rope.is_interleaved
        )
        sizes = self._sizes.op
        self.nbytes = sum(sizes.values())
        self._memory = _fresh_memory(self.nbytes + _HUGE_PAGE, rank)
        start = int(ffi.cast("uintptr_t", ffi.from_buffer(self._memory)))
        at = start + -start % _HUGE_PAGE
        self.address_of: dict[int, int] = {}
        self.norms = norms_of(checkpoint, program)
        self.biases: dict[int, NDArray[np.float32]] = {}
        for op in program.ops:
            self.address_of[op.index] = at if sizes[op.index] else 0
            self._pack(op, at)
            at += sizes[op.index]
            progress(sizes[op.index])

    def close(self) -> None:
        """Gives the memory back. Nothing may read the weights any more."""
        self._memory.close()
        self.norms.clear()

    def _pack(self, op: Op, at: int) -> None:
        """Packs an op's matrices at an address, and keeps its biases."""
        if op.biases:
            self.biases[op.index] = self._bias(op)
        kind = KINDS[op.kind]
        if kind.gives is Vector.LOGITS:
            self._pack_head(op, at)
            return
        matrices = [name for name in op.weights if not is_vector(name)]
        if not kind.is_product or not self._lanes:
            return
        of_lanes = [self._checkpoint.tensor(name, self._lanes) for name in matrices]
        for lane in range(len(self._lanes)):
            parts = [tensor[lane] for tensor in of_lanes]
            match kind.rows:
                case Rows.HEADS:
                    *turned, last = parts
                    _pack(at, np.concatenate([*map(self._reordered, turned), last]))
                case Rows.IN_TURN:
                    for number, part in enumerate(parts):
                        first = at + number * self._sizes.panel[op.index]
                        _pack(first, part, step=len(parts))
                case Rows.ONE:
                    (only,) = parts
                    _pack(at, only)
            at += self._sizes.lane[op.index]

    def _pack_head(self, op: Op, at: int) -> None:
        """Packs this rank's panels of the head, some rows at a time."""
        (name,) = op.weights
        rows = self._config.vocab_size // self._parts.num_groups
        for group, first, end in self._groups(self._parts.panels_per_group):
            for panel in range(first, end, PANELS_AT_ONCE):
                some = min(panel + PANELS_AT_ONCE, end)
                start, stop = group * rows + panel * ROWS, group * rows + min(some * ROWS, rows)
                _pack(at, self._checkpoint.rows(name, start, stop))
                at += (some - panel) * self._sizes.panel[op.index]

    def _groups(self, per_group: int) -> Iterator[tuple[int, int, int]]:
        """(group, first panel, end) of this rank's panels in each group."""
        panel = self._panels.start
        while panel < self._panels.stop:
            group = panel // per_group
            end = min(self._panels.stop, (group + 1) * per_group)
            yield group, panel - group * per_group, end - group * per_group
            panel = end

    def _bias(self, op: Op) -> NDArray[np.float32]:
        kind = KINDS[op.kind]
        if kind.ends_module:
            (name,) = op.biases
            return np.ascontiguousarray(self._checkpoint.tensor(name))
        if not self._lanes:
            return np.empty(0, np.float32)
        parts = [self._checkpoint.tensor(name, self._lanes) for name in op.biases]
        if kind.rows is Rows.HEADS:
            shape = len(self._lanes), -1, self._config.head_dim
            for part in parts[:-1]:
                part[:] = part.reshape(shape)[..., self._order].reshape(part.shape)
        return np.concatenate(parts, axis=1)

    def _reordered(self, rows: NDArray[Any]) -> NDArray[Any]:
        by_head = rows.reshape(-1, self._config.head_dim, rows.shape[1])
        return by_head[:, self._order].reshape(rows.shape)


def _fresh_memory(nbytes: int, rank: int) -> mmap.mmap:
    """Zeros in pages of their own.

    Raises:
        BackendError: There is no memory.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise kccl.BackendError(
            f"rank {rank} cannot allocate {nbytes} bytes of weights: {error.strerror}"
        ) from error
    try:
        # Fewer translations to look up while the weights stream.
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        # A kernel without huge pages: only speed is lost.
        if error.errno != errno.EINVAL:
            raise
    return memory


def _pack(at: int, rows: NDArray[Any], step: int = 1) -> None:
    """Packs BF16 rows at an address, as every `step`-th panel."""
    rows = np.ascontiguousarray(rows).view(np.uint16)
    source = ffi.from_buffer("uint16_t[]", rows)
    num_rows, num_columns = rows.shape
    panels = ffi.cast("uint16_t *", at)
    lib.kccl_engine_pack(panels, source, num_rows, num_columns, num_columns, step)
