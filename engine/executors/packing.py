"""One rank's part of a model's weights, packed for the host executor in the order of its ops.

engine/host/products.h says what a panel is. Rows of queries and keys are reordered so that the
pairs that RoPE turns lie side by side; products of queries and keys do not change by that.
"""

import mmap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..checkpoint import Checkpoint
from ..program import Op, Program
from .core import ffi, lib

ROWS: int = lib.kKcclEnginePanelRows
# Of rows of "embedding" and "head", which are too large to be read at once.
ROWS_AT_ONCE = 4096
_HUGE_PAGE = 2 << 20

Progress = Callable[[int], None]
"""Called with the number of bytes that were packed since the last call."""


def panels_for(num_rows: int) -> int:
    """Panels of a matrix with so many rows."""
    return -(-num_rows // ROWS)


def pair_order(head_dim: int, *, is_interleaved: bool) -> NDArray[np.intp]:
    """Where the executor's element i of a head lies in the checkpoint's head."""
    order = np.arange(head_dim)
    return order if is_interleaved else order.reshape(2, -1).T.ravel()


class Parts:
    """How lanes, panels of the head and rows of the embedding are spread over the ranks.

    Attributes:
        first_lane, first_panel, first_row: Of each rank, then the total.
        num_groups: Parts of the vocabulary whose logits come from a lane each; 1: from their mean.
        panels_per_group: Panels of one of them.
    """

    def __init__(self, program: Program, world_size: int) -> None:
        c = program.config
        self.num_groups = 1 if c.lm_head == "replicate" else c.num_lanes
        self.panels_per_group = panels_for(c.vocab_size // self.num_groups)

        def cut(total: int) -> list[int]:
            return [total * rank // world_size for rank in range(world_size + 1)]

        self.first_lane = cut(c.num_lanes)
        self.first_row = cut(c.vocab_size)
        self.first_panel = cut(self.panels_per_group)
        if self.num_groups > 1:
            # A lane's logits come from its own residual, which only its rank has.
            self.first_panel = [lane * self.panels_per_group for lane in self.first_lane]


class PackedWeights:
    """The packed weights of one rank, and the norms.

    Attributes:
        nbytes: Of the panels.
        address_of: Op index -> address of its panels; 0 where the rank has none.
        norms: Tensor name -> float32 array, in the executor's order of elements.
    """

    def __init__(
        self, checkpoint: Checkpoint, program: Program, parts: Parts, rank: int, progress: Progress
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._lanes = range(parts.first_lane[rank], parts.first_lane[rank + 1])
        self._panels = range(parts.first_panel[rank], parts.first_panel[rank + 1])
        self._parts = parts
        self._order = pair_order(
            self._config.head_dim, is_interleaved=self._config.rope.is_interleaved
        )
        sizes = {op.index: self._nbytes_of(op) for op in program.ops}
        self.nbytes = sum(sizes.values())
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, self.nbytes + _HUGE_PAGE, flags=flags)
        # Fewer translations to look up while the weights stream. Without huge pages it is slower.
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = int(ffi.cast("uintptr_t", ffi.from_buffer(self._memory)))
        at = start + -start % _HUGE_PAGE
        self.address_of: dict[int, int] = {}
        self.norms: dict[str, NDArray[np.float32]] = {}
        for op in program.ops:
            self.address_of[op.index] = at if sizes[op.index] else 0
            self._pack(op, at)
            at += sizes[op.index]
            progress(sizes[op.index])

    def _nbytes_of(self, op: Op) -> int:
        c = self._config
        lanes = c.num_lanes
        heads, kv_heads = (n // lanes * c.head_dim for n in (c.num_heads, c.num_kv_heads))
        per_lane = {
            "qkv": (panels_for(heads + 2 * kv_heads), c.hidden),
            "out": (panels_for(c.hidden), heads),
            "gate_up": (2 * panels_for(c.ffn // lanes), c.hidden),
            "down": (panels_for(c.hidden), c.ffn // lanes),
        }
        if op.kind == "head":
            return len(self._panels) * _panel_bytes(c.hidden)
        panels, columns = per_lane.get(op.kind, (0, 1))
        return len(self._lanes) * panels * _panel_bytes(columns)

    def _pack(self, op: Op, at: int) -> None:
        """Packs an op's matrices at an address, and keeps its norms."""
        for name in op.weights:
            if name.endswith("norm"):
                self.norms[name] = self._norm(name)
        if op.kind == "head":
            self._pack_head(op.weights[0], at)
            return
        matrices = [name for name in op.weights if not name.endswith("norm")]
        if op.kind == "embed" or not matrices or not self._lanes:
            return
        tensors = {name.rpartition(".")[2]: self._checkpoint.tensor(name) for name in matrices}
        for lane in self._lanes:
            of_lane = {name: tensor[lane] for name, tensor in tensors.items()}
            if op.kind == "qkv":
                both = [self._reordered(of_lane["wq"]), self._reordered(of_lane["wk"])]
                at += _pack(at, np.concatenate([*both, of_lane["wv"]]))
            elif op.kind == "gate_up":
                first = _panel_bytes(self._config.hidden)
                nbytes = _pack(at, of_lane["w1"], step=2)
                _pack(at + first, of_lane["w3"], step=2)
                at += nbytes
            else:
                (only,) = of_lane.values()
                at += _pack(at, only)

    def _pack_head(self, name: str, at: int) -> None:
        """Packs this rank's panels of the head, some rows at a time."""
        per_group = self._parts.panels_per_group
        rows = self._config.vocab_size // self._parts.num_groups
        for group, first, end in self._groups(per_group):
            stop = min(end * ROWS, rows)
            for start in range(first * ROWS, stop, ROWS_AT_ONCE):
                some = min(start + ROWS_AT_ONCE, stop)
                at += _pack(
                    at, self._checkpoint.rows(name, group * rows + start, group * rows + some)
                )

    def _groups(self, per_group: int) -> Iterator[tuple[int, int, int]]:
        """(group, first panel, end) of this rank's panels in each group."""
        panel = self._panels.start
        while panel < self._panels.stop:
            group = panel // per_group
            end = min(self._panels.stop, (group + 1) * per_group)
            yield group, panel - group * per_group, end - group * per_group
            panel = end

    def _norm(self, name: str) -> NDArray[np.float32]:
        weight = np.ascontiguousarray(self._checkpoint.tensor(name), np.float32)
        is_of_head = name.endswith(("q_norm", "k_norm"))
        return weight[self._order] if is_of_head else weight

    def _reordered(self, rows: NDArray[Any]) -> NDArray[Any]:
        by_head = rows.reshape(-1, self._config.head_dim, rows.shape[1])
        return by_head[:, self._order].reshape(rows.shape)


def _panel_bytes(num_columns: int) -> int:
    return 2 * int(lib.kccl_engine_panel_elements(num_columns))


def _pack(at: int, rows: NDArray[Any], step: int = 1) -> int:
    """Packs BF16 rows, every `step`-th panel; returns the bytes that all panels have."""
    rows = np.ascontiguousarray(rows).view(np.uint16)
    source = ffi.from_buffer("uint16_t[]", rows)
    num_rows, num_columns = rows.shape
    panels = ffi.cast("uint16_t *", at)
    lib.kccl_engine_pack(panels, source, num_rows, num_columns, num_columns, step)
    return panels_for(num_rows) * step * _panel_bytes(num_columns)
