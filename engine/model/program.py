"""A model as a static list of ops: what the reference and every executor run, in this order.

A layer has two modules, attention and MLP. Module n = 2 * layer is attention and ends with the op
"out"; module n = 2 * layer + 1 is the MLP and ends with the op "down", with experts "expert_down".
These ops add to the residual, and only they exchange messages between lanes. How they do it is data
in the op.

With o_l the output of lane l, and m_l the same rounded to `config.message_dtype`, all in FP32:

    is_blocking:  x_r = x_r + (m_0 + m_1 + ... + m_(L-1) + b)   for every residual r; b is the
                                                                 bias, if the op has one
    otherwise:    x_l = x_l + own_scale * o_l
                  x_l = x_l + (m_0 + ... + m_(L-1) without m_l)  if the op receives; the m are the
                                                                 messages of module `receives`

Sums go from left to right. A blocking sum takes a lane's own output rounded, as the others see it,
so that it is the same bits on every lane.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod, sqrt
from typing import Any

import numpy as np

from ..formats.base import Format
from ..formats.bfloat16 import BFLOAT16
from .config import ModelConfig, is_vector
from .ops import KINDS, MODULES, OpKind, Place, Vector, layer_of, module_of


@dataclass(frozen=True)
class Op:
    """One op of the program. Its output is what an executor that stops here returns: see
    diff.py.
    """

    index: int
    kind: str
    """A name in ops.KINDS."""
    name: str
    """The op's name, as in "layers.3.out". The four ops outside layers have their kind as name."""
    weights: tuple[str, ...]
    """The checkpoint's tensors, in the order in which the op reads them."""
    shape: tuple[int, int]
    """The shape of the output for one position: (lanes or residuals, values each)."""
    format: Format | None = None
    """In which its first matrix, or its table, is given; None: it has none."""
    formats: tuple[Format, ...] = ()
    """Those of all of them."""
    layer: int = 0
    biases: tuple[str, ...] = ()
    """Tensors too: one for each of its matrices, or none. They are added to the sum of a row, in
    "out" and "down" to that over all lanes."""
    window: int = 0
    """attend: the number of keys that a query sees, its own included; 0: all before it."""
    module: int = 0
    """out, down: 2 * layer or 2 * layer + 1. The fields below are theirs, too."""
    own_scale: float = 1.0
    """1 or sqrt(lanes), rounded to float32 where it is used."""
    is_blocking: bool = False
    sends: bool = False
    """Whether a later module receives this module's messages."""
    receives: int | None = None
    """The module whose messages land here."""

    def matrices(self) -> tuple[str, ...]:
        """Returns the tensors that are matrices, or the table."""
        return tuple(name for name in self.weights if not is_vector(name))

    def products(self) -> tuple[tuple[str, ...], ...]:
        """Returns the matrices of each product: one product for each expert, or a single one."""
        names, num = self.matrices(), len(KINDS[self.kind].matrices)
        return tuple(names[i : i + num] for i in range(0, len(names), num)) if num else (names,)

    def biases_of_products(self) -> tuple[tuple[str, ...], ...]:
        """Returns the biases of each product, as products() returns its matrices."""
        num = len(KINDS[self.kind].biases)
        return tuple(self.biases[i : i + num] for i in range(0, len(self.biases), num or 1))

    def sinks(self) -> tuple[str, ...]:
        """Returns the tensor of the attention sinks, if the model has them."""
        return self._tensors(KINDS[self.kind].sinks)

    def norms(self) -> tuple[str, ...]:
        """Returns the tensor of the RMSNorm that the vector passes before, or none."""
        return self._tensors(KINDS[self.kind].norm)

    def head_norms(self) -> tuple[str, ...]:
        """Returns the tensors of the RMSNorms of queries and keys, if the model has them."""
        return self._tensors(*KINDS[self.kind].head_norms)

    def _tensors(self, *parts: str) -> tuple[str, ...]:
        return tuple(name for name in self.weights if name.rpartition(".")[2] in parts)


class Program:
    """The ops of a model, and the values that they share."""

    def __init__(self, config: ModelConfig, formats: Mapping[str, Format] | None = None) -> None:
        """
        Args:
            config: The model's configuration.
            formats: The formats of matrices: Checkpoint.formats. Those that are left out are BF16.
        """
        self.config = config
        self._formats = {} if formats is None else formats
        self.ops = tuple(self._ops())

    @property
    def num_residuals(self) -> int:
        """Returns the number of residuals: 1 if the lanes share theirs, as in ordinary models; else
        one for each lane.
        """
        return 1 if self.config.delay == 0 else self.config.num_lanes

    @property
    def num_head_parts(self) -> int:
        """Returns the number of parts of the vocabulary. The logits of part i come from residual i.
        If it is 1, all come from the mean of the residuals.
        """
        return 1 if self.config.lm_head == "replicate" else self.num_residuals

    @property
    def num_in_flight(self) -> int:
        """Returns for how many modules messages may be under way at once: module n's are added at
        module n + this number.
        """
        return 2 * self.config.delay

    def lanes_of(self, rank: int, world_size: int) -> range:
        """Returns the lanes of one rank, of so many. The lanes are spread as evenly as possible."""
        num = self.config.num_lanes
        return range(num * rank // world_size, num * (rank + 1) // world_size)

    def most_lanes(self, world_size: int) -> int:
        """Returns the most lanes that any of so many ranks has."""
        return -(-self.config.num_lanes // world_size)

    def format_of(self, kind: str) -> Format:
        """Returns the format of the matrices of a kind of op, except of ops that have their own."""
        return self._formats.get(kind, BFLOAT16)

    def streamed_bytes(self) -> int:
        """Returns the bytes of weights that a token reads, as they are stored: all but the
        embedding, and only the chosen ones of experts. If the embedding is tied, it is read as the
        head. Norms and biases are in FP32.
        """
        shapes, vector = self.shapes, np.dtype(np.float32).itemsize
        experts, total = self.config.experts, 0
        for op in self.ops:
            if op.kind == "embed":
                continue
            for name in (*op.norms(), *op.head_norms(), *op.sinks()):
                total += prod(shapes[name]) * vector
            of_products = sum(prod(shapes[name]) for name in op.biases) * vector
            for name, stored_in in zip(op.matrices(), op.formats, strict=True):
                *rows, columns = shapes[name]
                of_products += prod(rows) * stored_in.bytes_of(columns)
            if KINDS[op.kind].has_experts and experts is not None:
                of_products = of_products * experts.chosen // experts.num
            total += of_products
        return total

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """ModelConfig.shapes(), which has an entry for each matrix of each expert."""
        return self.config.shapes()

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    def reach(self, length: int, context: int) -> int:
        """Returns the most positions, up to `context`, of a request with the same rotations as one
        of `length`.
        """
        return self.config.rope.reach(length, context)

    def rotations(
        self, length: int, start: int = 0, stop: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cosines and sines of RoPE, times its attention factor, in a request of
        `length` positions: float32 [stop - start, head_dim / 2] each, computed in float64 and
        rounded once.

        Args:
            length: Positions of prompt and answer together, on which frequencies may depend.
            start, stop: The positions from `start` to `stop` - 1; None: to the request's end.
        """
        rope = self.config.rope
        frequencies = rope.frequencies(self.config.head_dim, length)
        positions = np.arange(start, length if stop is None else stop, dtype=np.float64)
        angles = positions[:, None] * frequencies
        cosines, sines = (rope.attention_factor * turn(angles) for turn in (np.cos, np.sin))
        return cosines.astype(np.float32), sines.astype(np.float32)

    def _ops(self) -> list[Op]:
        c = self.config
        found: list[Op] = []

        def add(kind: OpKind, prefix: str = "", **fields: Any) -> None:
            names = tuple(prefix + name for name in kind.tensors(c))
            format_of = self._formats.get(prefix + kind.name, self.format_of(kind.name))
            formats = [
                self._formats.get(name, format_of) if kind.matrices else format_of
                for name in names
                if not is_vector(name)
            ]
            found.append(
                Op(
                    len(found),
                    kind.name,
                    prefix + kind.name,
                    names,
                    (self._num_vectors(kind.gives), kind.width(c)),
                    format=formats[0] if formats else None,
                    formats=tuple(formats),
                    biases=tuple(prefix + name for name in kind.bias_tensors(c)),
                    **fields,
                )
            )

        for kind in (kind for kind in KINDS.values() if kind.place is Place.BEFORE):
            add(kind)
        for layer in range(c.num_layers):
            for kind in layer_of(c):
                fields: dict[str, Any] = {"layer": layer}
                if kind.takes is Vector.HEADS:
                    fields["window"] = c.window_of(layer)
                if kind.ends_module:
                    fields |= self._exchange(len(MODULES) * layer + module_of(kind))
                add(kind, f"layers.{layer}.", **fields)
        for kind in (kind for kind in KINDS.values() if kind.place is Place.BEHIND):
            add(kind)
        return found

    def _num_vectors(self, vector: Vector) -> int:
        """Returns how many vectors of a kind there are at one position."""
        nums = {
            Vector.RESIDUAL: self.num_residuals,
            Vector.ROUTED: self.num_residuals,
            Vector.NORMED: self.num_head_parts,
            Vector.LOGITS: 1,
        }
        return nums.get(vector, self.config.num_lanes)

    def _exchange(self, module: int) -> dict[str, Any]:
        """Returns how the op that ends a module exchanges messages, as fields of Op. The module's
        docstring has the rules.
        """
        c, delay = self.config, self.num_in_flight
        is_early = module < delay
        if delay == 0 or (is_early and c.early_comm):
            return {"module": module, "is_blocking": True, "sends": self._sends(module)}
        # Lanes that do not add each other's outputs scale their own instead. The sum of that many
        # independent outputs would be as large.
        is_alone = is_early or not self._communicates(module)
        source = module - delay
        return {
            "module": module,
            "own_scale": sqrt(c.num_lanes) if is_alone else 1.0,
            "sends": self._sends(module),
            "receives": source if source >= 0 and self._sends(source) else None,
        }

    def _communicates(self, module: int) -> bool:
        return self.config.mlp_comm if module % 2 else self.config.attention_comm

    def _sends(self, module: int) -> bool:
        """Tells whether a module sends messages. The last modules send none, because they would
        arrive too late.
        """
        c, delay = self.config, self.num_in_flight
        lands = delay > 0 and c.num_lanes > 1 and module + delay < 2 * c.num_layers
        return lands and self._communicates(module) and (c.early_messages or module >= delay)
