"""A model as a static list of ops: what the reference and every executor run, in this order.

A layer has two modules, attention and MLP. Module n = 2 * layer is attention and ends with the op
"out"; module n = 2 * layer + 1 is the MLP and ends with the op "down", with experts "expert_down".
Only these ops add to the residual and exchange messages between lanes. Fields of Op say which of
the following rules an op follows.

Let x_r be residual r, o_l the module's output of lane l, and m_l the message: o_l rounded to
`config.message_dtype`. All sums are FP32:

    is_blocking:  x_r = x_r + (m_0 + m_1 + ... + m_(L-1) + b)   for every residual r; b is the
                                                                 bias, if the op has one
    otherwise:    x_l = x_l + own_scale * o_l
                  x_l = x_l + (m_0 + ... + m_(L-1) without m_l)  if the op receives; the m are the
                                                                 messages of module `receives`

Sums go from left to right. A blocking sum adds the rounded m_l also on lane l itself, so that it
has the same bits on every lane.
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
from .ops import KINDS, MODULES, OpKind, Place, Vector, layer_of, module_of, products_in


@dataclass(frozen=True)
class Op:
    """One op of the program. Its output is what run_until() of executors returns (diff.py)."""

    index: int
    kind: str
    """A name in ops.KINDS."""
    name: str
    """The op's name, as in "layers.3.out". Ops outside layers have their kind as name."""
    weights: tuple[str, ...]
    """The checkpoint's tensors, in the order in which the op reads them."""
    shape: tuple[int, int]
    """The shape of the output for one position: (lanes or residuals, values each)."""
    format: Format | None = None
    """The format of its first matrix, or of its table. None if it has neither."""
    formats: tuple[Format, ...] = ()
    """The formats of all its matrices, as matrices() returns them, or of its table."""
    layer: int = 0
    biases: tuple[str, ...] = ()
    """The tensors of its biases: one for each matrix, or none. A bias is added to the sums of the
    rows; that of an op which ends a module is added to the sum over all lanes."""
    window: int = 0
    """For attend: how many keys a query sees, its own key included. 0: it sees all keys so far."""
    module: int = 0
    """For ops that end a module: the module's number, 2 * layer or 2 * layer + 1. The fields below
    are for these ops only, too."""
    own_scale: float = 1.0
    """The factor of a lane's own output: 1 or sqrt(lanes), rounded to float32 where it is used."""
    is_blocking: bool = False
    sends: bool = False
    """Whether a later module receives this module's messages."""
    receives: int | None = None
    """The module whose messages this op adds. None if it adds none."""

    def matrices(self) -> tuple[str, ...]:
        """Returns the tensors of its matrices, or of its table."""
        return tuple(name for name in self.weights if not is_vector(name))

    def products(self) -> tuple[tuple[str, ...], ...]:
        """Returns the matrices of each of its products. An op has one product, or with experts one
        for each expert.
        """
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
        """Returns the tensor of the RMSNorm that is applied to the vector it reads, or none."""
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
            formats: The formats of matrices, as Checkpoint.formats has them. Matrices that it does
                not name are BF16.
        """
        self.config = config
        self._formats = {} if formats is None else formats
        self.ops = tuple(self._ops())

    @property
    def num_residuals(self) -> int:
        """Returns the number of residuals. That is 1 if the lanes share theirs, as in ordinary
        models. Otherwise there is one for each lane.
        """
        return 1 if self.config.delay == 0 else self.config.num_lanes

    @property
    def num_head_parts(self) -> int:
        """Returns into how many parts the head divides the vocabulary. Residual i gives the logits
        of part i. If there is one part, the mean of the residuals gives all logits.
        """
        return 1 if self.config.lm_head == "replicate" else self.num_residuals

    @property
    def num_in_flight(self) -> int:
        """Returns after how many modules a message is added: module n's messages are added at the
        end of module n + num_in_flight. So the messages of num_in_flight modules are under way at
        once.
        """
        return 2 * self.config.delay

    def lanes_of(self, rank: int, world_size: int) -> range:
        """Returns the lanes of a rank among `world_size` ranks. They are spread as evenly as
        possible.
        """
        num = self.config.num_lanes
        return range(num * rank // world_size, num * (rank + 1) // world_size)

    def most_lanes(self, world_size: int) -> int:
        """Returns the most lanes that any of `world_size` ranks has."""
        return -(-self.config.num_lanes // world_size)

    def format_of(self, kind: str) -> Format:
        """Returns the format of the matrices of a kind of op. An op or a tensor may have another
        one: Op.formats.
        """
        return self._formats.get(kind, BFLOAT16)

    def range_dtype(self) -> str:
        """Returns the type that an error of logits names: float16 if any product has it, because
        one such product is enough for a number beyond its range.
        """
        names = {self.format_of(kind).name for kind in products_in(self.config)}
        return "float16" if "float16" in names else "bfloat16"

    def streamed_bytes(self) -> int:
        """Returns the bytes of weights that a token reads, in the formats in which they are stored.
        Of the experts only the chosen ones count. The embedding does not count, unless it is also
        the head. Norms, biases and sinks are FP32.
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
        """Returns ModelConfig.shapes(). Cached, because it has an entry for each matrix of each
        expert.
        """
        return self.config.shapes()

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    def reach(self, length: int, context: int) -> int:
        """Returns the length of the longest request, up to `context`, that has the same rotations
        as a request of `length` positions.
        """
        return self.config.rope.reach(length, context)

    def rotations(
        self, length: int, start: int = 0, stop: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the cosines and sines of RoPE, multiplied by its attention factor, for a request
        of `length` positions: float32 [stop - start, head_dim / 2] each. They are computed in
        float64 and rounded once.

        Args:
            length: The positions of prompt and answer together. Frequencies may depend on it.
            start, stop: Returns those of positions `start` to `stop` - 1; None: to the request's
                end.
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
        """Returns how the op that ends a module exchanges messages, as fields of Op. This file's
        docstring has the rules.
        """
        c, delay = self.config, self.num_in_flight
        is_early = module < delay
        if delay == 0 or (is_early and c.early_comm):
            return {"module": module, "is_blocking": True, "sends": self._sends(module)}
        # A lane that does not add the other lanes' outputs scales its own by sqrt(lanes): then it
        # is as large as a sum of that many independent outputs would be.
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
