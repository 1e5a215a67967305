"""The table of ops: everything about each kind of op that does not depend on the executor.

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
    """Kinds of vectors that ops give and take. At one position there is one vector of a kind for
    each lane, residual or part of the head (Program._num_vectors()).
    """

    RESIDUAL = "residual"
    HEADS = "heads"
    """A lane's queries, keys and values."""
    ATTENDED = "attended"
    ROUTED = "routed"
    """The router's logit of each expert."""
    ACTS = "acts"
    """A lane's activations between the two products of the feed-forward block. With experts: those
    of all chosen experts."""
    NORMED = "normed"
    """The output of the last norm, which the head multiplies."""
    LOGITS = "logits"


class Rows(Enum):
    """How packers make one product from an op's matrices."""

    ONE = "one"
    """The op has one matrix, which is the product."""
    HEADS = "heads"
    """The matrices are stacked, each head by head. In all but the last matrix, RoPE rotates pairs
    of rows. The rows of a pair become neighbours.
    """
    IN_TURN = "in turn"
    """The matrices' rows alternate: some rows of the first matrix, as many of the second, and so
    on, until no rows are left."""


class Mlp(Enum):
    """The kind of feed-forward block that an op belongs to."""

    DENSE = "dense"
    EXPERTS = "experts"
    """A mixture of experts, of which each position uses some: experts.py."""


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


# Executors may differ from the reference for four reasons. Sums in another order change an output
# by 1e-6, and keys and values in F16 by 2**-12. A BF16 message may round the other way, which
# changes an element by 2**-8. And vectors lose the lowest bits of FP32.
_COMPUTED = Limit(2e-3, 1 - 2e-6)
_COPIED = Limit(0.0, 1 - 1e-12)


@dataclass(frozen=True, kw_only=True)
class OpKind:
    """One kind of op.

    Attributes:
        name: The last part of an op's name, as "out" in "layers.3.out".
        place: Where in the program the op runs. Ops of a layer run in the order of KINDS.
        mlp: The kind of feed-forward block whose models have the op. None means that all models
            have it.
        oracle: The name of Reference's method, without the leading underscore.
        takes: The vector that the op reads. None means that it reads the token's id.
        gives: The vector that the op makes.
        width: Returns the number of values of the vector that the op makes.
        norm: The tensor of the RMSNorm that is applied to the vector that the op reads. "" means
            none.
        matrices: The names of its matrices, in the order of the product's rows. If has_experts,
            each expert has matrices of these names.
        has_experts: Whether the matrices and biases are those of experts.
        rows: How packers make one product of the matrices.
        head_norms: The tensors of the RMSNorms of queries and keys, if the model has them.
        biases: The tensors of its biases, one for each matrix, if the model has them.
        sinks: The tensor of the attention sinks, if the model has them.
        table: "embedding" or "head" if the op's only weights are that matrix; "" otherwise.
        at_once: The most row tiles whose sums a block of the monokernel holds at a time, and the
            most that a stage of weights has. 0: all row tiles of the block.
        limit: How much an executor's output may differ from the oracle's. diff.py checks it.
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
        """Tells whether the op is the last one of a module: it adds the module's output to the
        residual, and exchanges messages between lanes.
        """
        return self.place is Place.LAYER and self.gives is Vector.RESIDUAL

    def tensors(self, config: "ModelConfig") -> tuple[str, ...]:
        """Returns the names, within the layer, of the op's tensors in the checkpoint without its
        biases. They are in the order in which the op reads them.
        """
        names = [self.norm, *self._of_experts(self.matrices, config)]
        names += self.head_norms if config.has_qk_norm else ()
        names.append(self.sinks if config.has_sinks else "")
        names.append("embedding" if self.table == "head" and config.is_tied else self.table)
        return tuple(name for name in names if name)

    def tensors_of_one(self, config: "ModelConfig") -> tuple[str, ...]:
        """Returns the names, within the layer, of the matrices of one of its products."""
        return self._of_experts(self.matrices, config)[: len(self.matrices)]

    def bias_tensors(self, config: "ModelConfig") -> tuple[str, ...]:
        """Returns the names, within the layer, of the op's biases in the checkpoint. Returns () if
        the model has none.
        """
        return self._of_experts(self.biases, config) if self.name in config.biases else ()

    def _of_experts(self, names: tuple[str, ...], config: "ModelConfig") -> tuple[str, ...]:
        if not self.has_experts:
            return names
        assert config.experts is not None
        each = range(config.experts.num)
        return tuple(f"experts.{expert}.{name}" for expert in each for name in names)


def _head_width(heads: Callable[["ModelConfig"], int]) -> Callable[["ModelConfig"], int]:
    """Makes OpKind.width of a vector of heads: the values of one lane's share of `heads` heads."""
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
        # A block has many row tiles of the head. The sums of all of them would take shared memory
        # from the ring of weights.
        at_once=8,
    ),
)

KINDS = {kind.name: kind for kind in _ALL}
"""Name -> kind of op, in the program's order."""
IN_LAYER = tuple(k for k in _ALL if k.place is Place.LAYER and k.mlp is not Mlp.EXPERTS)
"""The ops of a layer in models without experts, in order."""
IN_MIXTURE = tuple(k for k in _ALL if k.place is Place.LAYER and k.mlp is not Mlp.DENSE)
"""The ops of a layer in mixtures of experts, in order."""
PRODUCTS = tuple(kind.name for kind in _ALL if kind.is_product and kind.mlp is not Mlp.EXPERTS)
"""The products of models without experts, in the program's order: see products_in()."""
BIASES = {kind.name: kind.biases for kind in _ALL if kind.biases}
"""Kinds of ops whose products may have biases -> the biases, in the order of the op's matrices."""
MODULES = tuple(kind for kind in IN_LAYER if kind.ends_module)
"""The ops that end a layer's modules, in models without experts."""
ATTENTION, MLP = range(len(MODULES))


def layer_of(config: "ModelConfig") -> tuple[OpKind, ...]:
    """Returns the ops of a layer of a model, in their order."""
    return IN_LAYER if config.experts is None else IN_MIXTURE


def products_in(config: "ModelConfig") -> tuple[str, ...]:
    """Returns the names of a model's products, in the program's order. The monokernel numbers its
    products in this order.
    """
    head = (kind for kind in _ALL if kind.place is Place.BEHIND)
    return tuple(kind.name for kind in (*layer_of(config), *head) if kind.is_product)


def module_of(kind: OpKind) -> int:
    """Returns which module of its layer an op belongs to: ATTENTION or MLP."""
    layer = IN_LAYER if kind in IN_LAYER else IN_MIXTURE
    return sum(each.ends_module for each in layer[: layer.index(kind)])


def products_of_module(module: int, layer: tuple[OpKind, ...] = IN_LAYER) -> tuple[str, ...]:
    """Returns the names of the products of a module, ATTENTION or MLP. `layer` is IN_LAYER or
    IN_MIXTURE.
    """
    return tuple(kind.name for kind in layer if kind.is_product and module_of(kind) == module)
