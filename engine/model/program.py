"""A model as a static list of ops: what the reference and every executor run, in this order.

A layer has two modules, attention and MLP. Module n = 2 * layer is attention and ends with the op
"out"; module n = 2 * layer + 1 is the MLP and ends with the op "down". These two ops add to the
residual, and only they exchange messages between lanes. How they do it is data in the op.

With o_l the output of lane l, and m_l the same rounded to `config.message_dtype`, all in FP32:

    is_blocking:  x_r = x_r + (m_0 + m_1 + ... + m_(L-1) + b)   for every residual r; b is the
                                                                 bias, if the op has one
    otherwise:    x_l = x_l + own_scale * o_l
                  x_l = x_l + (m_0 + ... + m_(L-1) without m_l)  if the op receives; the m are the
                                                                 messages of module `receives`

Sums go from left to right. A blocking sum takes a lane's own output rounded, as the others see it,
so that it is the same bits on every lane.
"""

from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Any

import numpy as np

from .config import ModelConfig
from .ops import IN_LAYER, KINDS, MODULES, OpKind, Place, Vector, module_of


@dataclass(frozen=True)
class Op:
    """One step. Its output is what an executor that stops here returns: see diff.py."""

    index: int
    kind: str
    """A name in ops.KINDS."""
    name: str
    """As in "layers.3.out"; of the four ops outside layers the kind alone."""
    weights: tuple[str, ...]
    """The checkpoint's tensors, in the order in which the op reads them."""
    shape: tuple[int, int]
    """The shape of the output for one position: (lanes or residuals, values each)."""
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

    def norms(self) -> tuple[str, ...]:
        """The tensor of the RMSNorm that the vector passes before, or none."""
        return self._tensors(KINDS[self.kind].norm)

    def head_norms(self) -> tuple[str, ...]:
        """The tensors of the RMSNorms of queries and keys, if the model has them."""
        return self._tensors(*KINDS[self.kind].head_norms)

    def _tensors(self, *parts: str) -> tuple[str, ...]:
        return tuple(name for name in self.weights if name.rpartition(".")[2] in parts)


class Program:
    """The ops of a model, and what they share."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.ops = tuple(self._ops())

    @property
    def num_residuals(self) -> int:
        """1 if the lanes share their residual, as in ordinary models; else one for each lane."""
        return 1 if self.config.delay == 0 else self.config.num_lanes

    @property
    def num_head_parts(self) -> int:
        """Parts of the vocabulary whose logits each come from a residual of their own, part i from
        residual i; 1: all come from the mean of the residuals.
        """
        return 1 if self.config.lm_head == "replicate" else self.num_residuals

    @property
    def num_in_flight(self) -> int:
        """How many modules' messages may be under way at once: module n's land at n + this."""
        return 2 * self.config.delay

    def lanes_of(self, rank: int, world_size: int) -> range:
        """The lanes of a rank of so many: as evenly as they go."""
        num = self.config.num_lanes
        return range(num * rank // world_size, num * (rank + 1) // world_size)

    def most_lanes(self, world_size: int) -> int:
        """The most lanes that any of so many ranks has."""
        return -(-self.config.num_lanes // world_size)

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    def reach(self, length: int, context: int) -> int:
        """The most positions, up to `context`, of a request that rotates as one of `length`."""
        return self.config.rope.reach(length, context)

    def rotations(
        self, length: int, start: int = 0, stop: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """The cosines and sines of RoPE, times its attention factor, in a request of `length`
        positions: float32 [stop - start, head_dim / 2] each, computed in float64 and rounded once.

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
            biases = kind.biases if kind.name in c.biases else ()
            found.append(
                Op(
                    len(found),
                    kind.name,
                    prefix + kind.name,
                    tuple(prefix + name for name in kind.tensors(c)),
                    (self._num_vectors(kind.gives), kind.width(c)),
                    biases=tuple(prefix + name for name in biases),
                    **fields,
                )
            )

        for kind in (kind for kind in KINDS.values() if kind.place is Place.BEFORE):
            add(kind)
        for layer in range(c.num_layers):
            for kind in IN_LAYER:
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
        """How many of a vector there are at one position."""
        nums = {
            Vector.RESIDUAL: self.num_residuals,
            Vector.NORMED: self.num_head_parts,
            Vector.LOGITS: 1,
        }
        return nums.get(vector, self.config.num_lanes)

    def _exchange(self, module: int) -> dict[str, Any]:
        """How the op that ends a module exchanges messages, as fields of Op. The module's docstring
        has the rules.
        """
        c, delay = self.config, self.num_in_flight
        is_early = module < delay
        if delay == 0 or (is_early and c.early_comm):
            return {"module": module, "is_blocking": True, "sends": self._sends(module)}
        # Lanes that do not add each other's outputs scale their own instead: the sum of as many
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
        """The last modules do not: their messages would land after the last layer."""
        c, delay = self.config, self.num_in_flight
        lands = delay > 0 and c.num_lanes > 1 and module + delay < 2 * c.num_layers
        return lands and self._communicates(module) and (c.early_messages or module >= delay)
