"""Packs one rank's part of a model's weights for the host executor, in the order of its ops.

engine/host/products.h says what a panel is. The rows of wq and wk are reordered so that the two
elements that RoPE rotates together are neighbours. Queries and keys are permuted alike, so their
dot products do not change.
"""

import errno
import mmap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.core import ffi, lib
from ..files.checkpoint import Checkpoint
from ..files.packed_cache import PackedCache
from ..files.vectors import norms_of
from ..formats.base import Format
from ..model.ops import KINDS, OpKind, Rows, Vector
from ..model.program import Op, Program
from ..model.rotations import pair_order
from .kept_panels import KeptPanels

ROWS: int = lib.kKcclEnginePanelRows
# The embedding and the head are large. So they are read in parts of this many panels, each of which
# has ROWS rows.
PANELS_AT_ONCE = 32
_HUGE_PAGE = 2 << 20

Progress = Callable[[int], None]
"""A function that is called with the number of bytes packed since its last call."""


def number_of(op: Op) -> int:
    """Returns the KcclEngineKind (host/api.inc) of an op's kind."""
    name = "kKcclEngine" + op.kind.title().replace("_", "")
    return int(getattr(lib, name))


def format_number(stored_in: Format) -> int:
    """Returns the number of a format in C++. Raises InvalidArgument if the host executor does not
    multiply the format.
    """
    number = int(lib.kccl_engine_format(stored_in.name.encode()))
    if number < 0:
        raise kccl.InvalidArgument(f"the host executor multiplies no weights in {stored_in.name}")
    return number


def panel_bytes(stored_in: Format, num_columns: int) -> int:
    """Returns the size in bytes of a panel with `num_columns` columns."""
    return int(lib.kccl_engine_panel_bytes(format_number(stored_in), num_columns))


def panels_for(num_rows: int) -> int:
    """Returns the number of panels of a matrix with `num_rows` rows."""
    return -(-num_rows // ROWS)


class Parts:
    """How lanes, panels of the head and rows of the embedding are spread over the ranks.

    Attributes:
        first_lane, first_panel, first_row: [rank]: the rank's first lane, panel of the head, and
            row of the embedding. The last element, [world_size], is the total.
        num_groups: The number of parts of the head: Program.num_head_parts.
        panels_per_group: The panels of one part of the head.
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
            # A lane's logits are made from its residual, which only the lane's rank has. So this
            # rank must have the lane's panels.
            self.first_panel = [lane * self.panels_per_group for lane in self.first_lane]


def shape_of(program: Program, parts: Parts) -> Any:
    """Returns a KcclEngineModel with the model's sizes. Its other fields are zero."""
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
        "embedding_row_bytes": program.format_of("embed").bytes_of(c.hidden),
        "num_head_groups": parts.num_groups,
        "rounds_messages": c.message_dtype == "bfloat16",
        "num_slots": 1,
        "norm_eps": c.norm_eps,
        "attention_scale": c.attention_scale,
        "swiglu_limit": c.swiglu_limit,
    }
    if c.experts is not None:
        fields |= {
            "num_experts": c.experts.num,
            "num_chosen": c.experts.chosen,
            "normalises_choice": c.experts.is_normalised,
        }
    for name, value in fields.items():
        setattr(model, name, value)
    for name in ("first_lane", "first_panel", "first_row"):
        for rank, value in enumerate(getattr(parts, name)):
            getattr(model, name)[rank] = value
    return model


class Part(NamedTuple):
    """Consecutive matrices of an op that have the same format.

    Attributes:
        format: The format.
        matrices: The matrices' tensors.
        first: The index, among a lane's panels, of the part's first panel.
        nbytes: The bytes of the part's panels in a lane.
    """

    format: Format
    matrices: tuple[str, ...]
    first: int
    nbytes: int


def parts_of(program: Program, op: Op, num_panels: int, num_columns: int) -> list[Part]:
    """Returns the parts of an op, or none if it has no weights. With experts, these are the parts
    of the first expert. The other experts' parts have the same formats and sizes.

    Args:
        program, op: The op, and its program.
        num_panels: The op's panels in a lane.
        num_columns: The columns of its matrices.
    """
    shapes, rows, found = program.shapes, 0, []
    # Only the matrices of qkv may have several formats. No panel has rows of two of these.
    are_apart = KINDS[op.kind].rows is Rows.HEADS
    matrices = zip(next(iter(op.products()), ()), op.formats, strict=False)
    for stored_in, some in groupby(matrices, key=lambda each: each[1]):
        names, first = tuple(name for name, _ in some), rows // ROWS
        rows += sum(shapes[name][-2] for name in names)
        end = panels_for(rows) if are_apart else num_panels
        found.append(
            Part(stored_in, names, first, (end - first) * panel_bytes(stored_in, num_columns))
        )
    return found


class Sizes:
    """The sizes in bytes of one rank's packed weights.

    Attributes:
        parts: Op index -> the parts of its weights.
        panel: Op index -> the bytes of one panel of its first part. 0 if the op has no weights.
        lane: Op index -> the bytes of one lane's panels; with experts, of one expert.
        op: Op index -> the bytes of all of the op's panels that the rank has.
        embedding: The bytes of the rank's rows of the embedding.
        total: The bytes of the embedding and of all ops' panels.
    """

    def __init__(self, program: Program, parts: Parts, rank: int) -> None:
        model = shape_of(program, parts)
        lanes = parts.first_lane[rank + 1] - parts.first_lane[rank]
        panels_of_head = parts.first_panel[rank + 1] - parts.first_panel[rank]
        self.parts: dict[int, list[Part]] = {}
        self.panel: dict[int, int] = {}
        self.lane: dict[int, int] = {}
        self.op: dict[int, int] = {}
        panels, columns = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        for op in program.ops:
            lib.kccl_engine_matrix(model, number_of(op), panels, columns)
            of_op = parts_of(program, op, panels[0], columns[0])
            self.parts[op.index] = of_op
            panel = panel_bytes(op.format, columns[0]) if op.format is not None else 0
            self.panel[op.index] = panel
            self.lane[op.index] = sum(part.nbytes for part in of_op)
            match KINDS[op.kind].gives:
                case Vector.LOGITS:
                    self.op[op.index] = panels_of_head * panel
                case Vector.ROUTED:
                    # Every rank has the whole router.
                    self.op[op.index] = self.lane[op.index]
                case _:
                    self.op[op.index] = len(op.products()) * lanes * self.lane[op.index]
        rows = parts.first_row[rank + 1] - parts.first_row[rank]
        self.embedding = rows * int(model.embedding_row_bytes)
        self.total = self.embedding + sum(self.op.values())


class PackedWeights:
    """The packed weights of one rank, the norms and the biases.

    Attributes:
        nbytes: The bytes of the panels.
        address_of: Op index -> the address of the op's panels. 0 if the rank has none of them.
        norms: See norms_of().
        biases: Index of an op that has biases -> float32 array, as KcclEngineOp.bias in api.inc.
        sinks: Index of an op that has attention sinks -> float32 [lanes, heads of a lane].
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        program: Program,
        parts: Parts,
        rank: int,
        progress: Progress,
        cache: PackedCache | None = None,
    ) -> None:
        self._checkpoint, self._config = checkpoint, checkpoint.config
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
        self.sinks: dict[int, NDArray[np.float32]] = {}
        panels = np.frombuffer(self._memory, np.uint8, self.nbytes, at - start)
        where = (checkpoint, rank, len(parts.first_lane) - 1, sizes, panels)
        with KeptPanels(cache, *where) as kept:
            there = kept.load()
            for op in program.ops:
                self.address_of[op.index] = at if sizes[op.index] else 0
                self._read_vectors(op)
                if op.index not in there:
                    self._pack(op, at)
                    kept.store(op.index)
                at += sizes[op.index]
                progress(sizes[op.index])
            kept.finish()
        # Drops the reference to the checkpoint, so that its owner can free the tensors.
        del self._checkpoint

    def parts_of(self, op: Op) -> list[Part]:
        """Returns the parts of an op's weights."""
        return self._sizes.parts[op.index]

    def close(self) -> None:
        """Frees the memory. No thread may read the weights any more."""
        self._memory.close()
        self.norms.clear()

    def _read_vectors(self, op: Op) -> None:
        """Reads an op's biases and sinks."""
        if op.biases:
            self.biases[op.index] = self._bias(op)
        for name in op.sinks():
            sinks = self._checkpoint.tensor(name, self._lanes) if self._lanes else np.empty(0)
            self.sinks[op.index] = np.ascontiguousarray(sinks, np.float32)

    def _pack(self, op: Op, at: int) -> None:
        """Packs an op's matrices at an address."""
        kind = KINDS[op.kind]
        if kind.gives is Vector.LOGITS:
            return self._pack_head(op, at)
        if not kind.is_product:
            return
        if kind.gives is Vector.ROUTED:
            (router,) = op.matrices()
            read = self._checkpoint.read(router)
            _pack(read.format, at, read.words)
            return
        if self._lanes:
            for matrices in op.products():
                self._pack_product(op, matrices, at)
                at += len(self._lanes) * self._sizes.lane[op.index]

    def _pack_product(self, op: Op, matrices: Sequence[str], at: int) -> None:
        """Packs the matrices of one product, lane after lane."""
        kind = KINDS[op.kind]
        of_lanes = {name: self._checkpoint.read(name, self._lanes).words for name in matrices}
        for lane in range(len(self._lanes)):
            for part in self._sizes.parts[op.index]:
                named = matrices if kind.has_experts else part.matrices
                rows = [of_lanes[name][lane] for name in named]
                match kind.rows:
                    case Rows.HEADS:
                        turned = [
                            each if name == matrices[-1] else self._reordered(each)
                            for name, each in zip(part.matrices, rows, strict=True)
                        ]
                        _pack(part.format, at, np.concatenate(turned))
                    case Rows.IN_TURN:
                        for number, each in enumerate(rows):
                            first = at + number * self._sizes.panel[op.index]
                            _pack(part.format, first, each, step=len(rows))
                    case Rows.ONE:
                        (only,) = rows
                        _pack(part.format, at, only)
                at += part.nbytes

    def _pack_head(self, op: Op, at: int) -> None:
        """Packs this rank's panels of the head, some rows at a time."""
        (name,) = op.weights
        rows = self._config.vocab_size // self._parts.num_groups
        for group, first, end in self._groups(self._parts.panels_per_group):
            for panel in range(first, end, PANELS_AT_ONCE):
                some = min(panel + PANELS_AT_ONCE, end)
                start, stop = group * rows + panel * ROWS, group * rows + min(some * ROWS, rows)
                rows_of = self._checkpoint.read_rows(name, start, stop)
                _pack(rows_of.format, at, rows_of.words)
                at += (some - panel) * self._sizes.panel[op.index]

    def _groups(self, per_group: int) -> Iterator[tuple[int, int, int]]:
        """Yields, for each part ("group") of the head in which this rank has panels, the part's
        number and the range of these panels within the part: (group, first, end).
        """
        panel = self._panels.start
        while panel < self._panels.stop:
            group = panel // per_group
            end = min(self._panels.stop, (group + 1) * per_group)
            yield group, panel - group * per_group, end - group * per_group
            panel = end

    def _bias(self, op: Op) -> NDArray[np.float32]:
        kind = KINDS[op.kind]
        if kind.ends_module or kind.gives is Vector.ROUTED:
            return np.stack([self._checkpoint.tensor(name) for name in op.biases])
        if not self._lanes:
            return np.empty(0, np.float32)
        return np.stack([self._bias_of_lanes(kind, each) for each in op.biases_of_products()])

    def _bias_of_lanes(self, kind: OpKind, names: Sequence[str]) -> NDArray[np.float32]:
        """Returns the biases of one product, [lanes, rows of a lane]."""
        parts = [self._checkpoint.tensor(name, self._lanes) for name in names]
        if kind.rows is Rows.HEADS:
            shape = len(self._lanes), -1, self._config.head_dim
            for part in parts[:-1]:
                part[:] = part.reshape(shape)[..., self._order].reshape(part.shape)
        return np.concatenate(parts, axis=1)

    def _reordered(self, rows: NDArray[Any]) -> NDArray[Any]:
        by_head = rows.reshape(-1, self._config.head_dim, rows.shape[1])
        return by_head[:, self._order].reshape(rows.shape)


def _fresh_memory(nbytes: int, rank: int) -> mmap.mmap:
    """Returns zeroed memory in pages of its own. They are huge pages if the Linux kernel supports
    them.

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
        # With huge pages there are fewer TLB misses while the weights are read.
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        # EINVAL: the Linux kernel has no transparent huge pages. Then reading is only slower.
        if error.errno != errno.EINVAL:
            raise
    return memory


def _pack(stored_in: Format, at: int, words: NDArray[Any], step: int = 1) -> None:
    """Packs rows of a format into panels. Writes the first panel to address `at`, and each further
    one `step` panels after the one before.
    """
    rows = np.ascontiguousarray(words)
    source = ffi.from_buffer("uint8_t[]", rows.view(np.uint8))
    num_rows, num_words = rows.shape
    num_columns = num_words // stored_in.words * stored_in.block
    panels = ffi.cast("uint8_t *", at)
    lib.kccl_engine_pack(format_number(stored_in), panels, source, num_rows, num_columns, step)
