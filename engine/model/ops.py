"""The table of ops: all that the engine knows of each kind of op, whatever executor runs it.

The program (program.py) is made from it. The reference, both executors, their packers, diff.py and
the benchmarks read it. The monokernel is compiled with a table that is generated from it
(monokernel/sequence.py). engine/README.md says what a new kind of op needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .config import ModelConfig


class Vector(Enum):
    """The vectors that go from op to op. Each has one value per row for each lane, residual or part
    of the head.
    """

    RESIDUAL = "residual"
    HEADS = "heads"
    """A lane's queries, keys and values."""
    ATTENDED = "attended"
    ROUTED = "routed"
    """The router's logit of each expert."""
    ACTS = "acts"
    """A lane's features between the two products of the feed-forward block; with experts, those of
    each chosen expert."""
    NORMED = "normed"
    """What the head multiplies."""
    LOGITS = "logits"


class Rows(Enum):
    """How packers make one product from an op's matrices."""

    ONE = "one"
    """There is one matrix."""
    HEADS = "heads"
    """They lie below each other, head by head. In all but the last one, RoPE turns pairs of rows,
    which are put side by side.
    """
    IN_TURN = "in turn"
    """Equally many rows of each follow each other, as often as there are any."""


class Mlp(Enum):
    """The kind of feed-forward block that an op belongs to."""

    DENSE = "dense"
    EXPERTS = "experts"
    """A mixture of experts, from which each position takes some: experts.py."""


class Place(Enum):
    """The place of an op in the program."""

    BEFORE = "before the layers"
    LAYER = "in each layer"
    BEHIND = "behind the layers"


@dataclass(frozen=True)
class Limit:
    """How far an op's output may be from the reference's.

    Attributes:
        rmse: The largest root mean square of the errors, as a share of that of the reference's
            output.
        cosine: The least cosine between the output and the reference's, over all positions.
    """

    rmse: float
    cosine: float


# These things change an op's output: sums in another order, by 1e-6; keys and values in F16, by
# 2**-12; messages in BF16 that round the other way, by 2**-8 of an element; and vectors that lose
# the lowest bits of FP32.
_COMPUTED = Limit(2e-3, 1 - 2e-6)
_COPIED = Limit(0.0, 1 - 1e-12)


@dataclass(frozen=True, kw_only=True)
class OpKind:
    """One kind of op.

    Attributes:
        name: The last part of an op's name, as "out" in "layers.3.out".
        place: Where in the program the op runs. Ops of a layer run in the order of KINDS.
        mlp: The kind of feed-forward block whose models have the op; None: all models have it.
        oracle: The name of Reference's method, without the leading underscore.
        takes: The vector that it reads, and multiplies if it has matrices; None: the token's id.
        gives: The vector that it makes.
        width: The number of values of the vector that it makes.
        norm: The tensor of the RMSNorm that the vector passes before; "": none.
        matrices: The names of its matrices, in the order of the product's rows; each expert has
            these, if has_experts.
        has_experts: Whether the matrices and biases are those of experts.
        rows: How packers make one product of the matrices.
        head_norms: The tensors of the RMSNorms of queries and keys, if the model has them.
        biases: The tensors of its biases, one for each matrix, if the model has them.
        sinks: The tensor of the attention sinks, if the model has them.
        table: "embedding" or "head" if the op's weights are that whole matrix; "" otherwise.
        at_once: The most row tiles whose sums a block of the monokernel holds at a time. A stage of
            weights has no more row tiles either. 0: all row tiles of the block.
        limit: How much an executor's output may differ from the oracle's: diff.py.
    """

    name: str
    place: Place
    mlp: Mlp | None = None
    oracle: str
    takes: Vector | None
    gives: Vector
    width: Callable[["ModelConfig"], int]
    norm: str = ""
    matrices: tuple[str, ...] = ()
    has_experts: bool = False
    rows: Rows = Rows.ONE
    head_norms: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    sinks: str = ""
    table: str = ""
    at_once: int = 0
    limit: Limit = _COMPUTED

    @property
    def is_product(self) -> bool:
        """Tells whether the op multiplies a vector by matrices."""
        return bool(self.matrices) or self.gives is Vector.LOGITS

    @property
    def ends_module(self) -> bool:
        """Tells whether the op adds to the residual, and so exchanges messages between lanes."""
        return self.place is Place.LAYER and self.gives is Vector.RESIDUAL

    def tensors(self, config: "ModelConfig") -> tuple[str, ...]:
        """Returns the checkpoint's tensors without the biases, in the order in which the op reads
        them; names within the layer.
        """
        names = [self.norm, *self._of_experts(self.matrices, config)]
        names += self.head_norms if config.has_qk_norm else ()
        names.append(self.sinks if config.has_sinks else "")
        names.append("embedding" if self.table == "head" and config.is_tied else self.table)
        return tuple(name for name in names if name)

    def bias_tensors(self, config: "ModelConfig") -> tuple[str, ...]:
        """Returns the checkpoint's tensors of the op's biases, as tensors() does; none if the model
        has none.
        """
        return self._of_experts(self.biases, config) if self.name in config.biases else ()

    def _of_experts(self, names: tuple[str, ...], config: "ModelConfig") -> tuple[str, ...]:
        if not self.has_experts:
            return names
        assert config.experts is not None
        each = range(config.experts.num)
        return tuple(f"experts.{expert}.{name}" for expert in each for name in names)


def _head_width(heads: Callable[["ModelConfig"], int]) -> Callable[["ModelConfig"], int]:
    """Returns one lane's part of the values of so many heads over all lanes."""
    return lambda c: heads(c) // c.num_lanes * c.head_dim


_ALL = (
    OpKind(
        name="embed",
        place=Place.BEFORE,
        oracle="embed",
        takes=None,
        gives=Vector.RESIDUAL,
        width=lambda c: c.hidden,
        table="embedding",
        limit=_COPIED,
    ),
    OpKind(
        name="qkv",
        place=Place.LAYER,
        oracle="qkv",
        takes=Vector.RESIDUAL,
        gives=Vector.HEADS,
        width=_head_width(lambda c: c.num_heads + 2 * c.num_kv_heads),
        norm="attention_norm",
        matrices=("wq", "wk", "wv"),
        rows=Rows.HEADS,
        head_norms=("q_norm", "k_norm"),
        biases=("bq", "bk", "bv"),
    ),
    OpKind(
        name="attend",
        place=Place.LAYER,
        oracle="attend",
        takes=Vector.HEADS,
        gives=Vector.ATTENDED,
        width=_head_width(lambda c: c.num_heads),
        sinks="sinks",
    ),
    OpKind(
        name="out",
        place=Place.LAYER,
        oracle="exchange",
        takes=Vector.ATTENDED,
        gives=Vector.RESIDUAL,
        width=lambda c: c.hidden,
        matrices=("wo",),
        biases=("bo",),
    ),
    OpKind(
        name="gate_up",
        place=Place.LAYER,
        mlp=Mlp.DENSE,
        oracle="swiglu",
        takes=Vector.RESIDUAL,
        gives=Vector.ACTS,
        width=lambda c: c.ffn // c.num_lanes,
        norm="ffn_norm",
        matrices=("w1", "w3"),
        rows=Rows.IN_TURN,
        biases=("b1", "b3"),
    ),
    OpKind(
        name="down",
        place=Place.LAYER,
        mlp=Mlp.DENSE,
        oracle="exchange",
        takes=Vector.ACTS,
        gives=Vector.RESIDUAL,
        width=lambda c: c.hidden,
        matrices=("w2",),
        biases=("b2",),
    ),
    OpKind(
        name="router",
        place=Place.LAYER,
        mlp=Mlp.EXPERTS,
        oracle="router",
        takes=Vector.RESIDUAL,
        gives=Vector.ROUTED,
        width=lambda c: c.experts.num if c.experts else 0,
        norm="ffn_norm",
        matrices=("router",),
        biases=("router_bias",),
    ),
    OpKind(
        name="expert_gate_up",
        place=Place.LAYER,
        mlp=Mlp.EXPERTS,
        oracle="expert_gate_up",
        takes=Vector.RESIDUAL,
        gives=Vector.ACTS,
        width=lambda c: c.experts.chosen * (c.ffn // c.num_lanes) if c.experts else 0,
        norm="ffn_norm",
        matrices=("w1", "w3"),
        has_experts=True,
        rows=Rows.IN_TURN,
        biases=("b1", "b3"),
    ),
    OpKind(
        name="expert_down",
        place=Place.LAYER,
        mlp=Mlp.EXPERTS,
        oracle="expert_down",
        takes=Vector.ACTS,
        gives=Vector.RESIDUAL,
        width=lambda c: c.hidden,
        matrices=("w2",),
        has_experts=True,
        biases=("b2",),
    ),
    OpKind(
        name="final",
        place=Place.BEHIND,
        oracle="final",
        takes=Vector.RESIDUAL,
        gives=Vector.NORMED,
        width=lambda c: c.hidden,
        norm="norm",
    ),
    OpKind(
        name="head",
        place=Place.BEHIND,
        oracle="head",
        takes=Vector.NORMED,
        gives=Vector.LOGITS,
        width=lambda c: c.vocab_size,
        table="head",
        # With more row tiles at once, their sums would take room from the ring of weights.
        at_once=8,
    ),
)

KINDS = {kind.name: kind for kind in _ALL}
"""By name, in the program's order."""
IN_LAYER = tuple(k for k in _ALL if k.place is Place.LAYER and k.mlp is not Mlp.EXPERTS)
"""The ops of a layer, in models without experts: those that the monokernel knows."""
IN_MIXTURE = tuple(k for k in _ALL if k.place is Place.LAYER and k.mlp is not Mlp.DENSE)
"""The ops of a layer, in mixtures of experts."""
PRODUCTS = tuple(kind.name for kind in _ALL if kind.is_product and kind.mlp is not Mlp.EXPERTS)
"""The ops that multiply in models without experts, in the program's order. The monokernel numbers
them so."""
BIASES = {kind.name: kind.biases for kind in _ALL if kind.biases}
"""Kinds of ops whose products may have biases -> the biases, in the order of the op's matrices."""
MODULES = tuple(kind for kind in IN_LAYER if kind.ends_module)
"""The ops that end a layer's modules, in models without experts."""
ATTENTION, MLP = range(len(MODULES))


def layer_of(config: "ModelConfig") -> tuple[OpKind, ...]:
    """Returns the ops of a layer of a model, in their order."""
    return IN_LAYER if config.experts is None else IN_MIXTURE


def module_of(kind: OpKind) -> int:
    """Returns the number of the module that an op of a layer belongs to, within the layer."""
    layer = IN_LAYER if kind in IN_LAYER else IN_MIXTURE
    return sum(each.ends_module for each in layer[: layer.index(kind)])


def products_of_module(module: int, layer: tuple[OpKind, ...] = IN_LAYER) -> tuple[str, ...]:
    """Returns the ops of a layer's module, ATTENTION or MLP, that multiply. layer: IN_LAYER or
    IN_MIXTURE.
    """
    return tuple(kind.name for kind in layer if kind.is_product and module_of(kind) == module)
