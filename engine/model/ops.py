"""The table of ops: what is known of each kind of op, whoever runs it.

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
    """The vectors that go from op to op, each with one value per row for each lane, residual or
    part of the head.
    """

    RESIDUAL = "residual"
    HEADS = "heads"
    """A lane's queries, keys and values."""
    ATTENDED = "attended"
    ACTS = "acts"
    """A lane's features between the two products of the feed-forward block."""
    NORMED = "normed"
    """What the head multiplies."""
    LOGITS = "logits"


class Rows(Enum):
    """How packers make one product of an op's matrices."""

    ONE = "one"
    """There is one matrix."""
    HEADS = "heads"
    """They lie below each other, head by head. In all but the last one, RoPE turns pairs of rows,
    which are put side by side.
    """
    IN_TURN = "in turn"
    """Equally many rows of each follow each other, as often as there are any."""


class Place(Enum):
    """Where in the program an op runs."""

    BEFORE = "before the layers"
    LAYER = "in each layer"
    BEHIND = "behind the layers"


@dataclass(frozen=True)
class Limit:
    """How far an op's output may be from the reference's.

    Attributes:
        rmse: Root mean square of the errors, in relation to that of the reference's output.
        cosine: At least, between the output and the reference's, all positions together.
    """

    rmse: float
    cosine: float


# What moves an output: sums in another order, by 1e-6; keys and values in F16, by 2**-12; messages
# in BF16 that round the other way, by 2**-8 of an element; and vectors that lose the lowest bits of
# FP32.
_COMPUTED = Limit(2e-3, 1 - 2e-6)
_COPIED = Limit(0.0, 1 - 1e-12)


@dataclass(frozen=True, kw_only=True)
class OpKind:
    """One kind of op.

    Attributes:
        name: As in "layers.3.out".
        place: Where in the program it runs; in a layer, in the order of KINDS.
        oracle: Reference's method, less the leading underscore.
        takes: The vector that it reads, and multiplies if it has matrices; None: the token's id.
        gives: The vector that it makes.
        width: Of the vector that it makes, in values.
        norm: The tensor of the RMSNorm that the vector passes before; "": none.
        matrices: Tensors, in the order of the product's rows.
        rows: How packers make one product of them.
        head_norms: Tensors of the RMSNorms of queries and keys, if the model has them.
        biases: Tensors, one for each matrix, if the model has them.
        table: Its weights are the whole embedding, or the head, by this name; "": no such table.
        at_once: Most row tiles of the product whose sums a block of the monokernel holds, and so
            how many a stage of weights may be of; 0: all of the block's.
        limit: For diff.py.
    """

    name: str
    place: Place
    oracle: str
    takes: Vector | None
    gives: Vector
    width: Callable[["ModelConfig"], int]
    norm: str = ""
    matrices: tuple[str, ...] = ()
    rows: Rows = Rows.ONE
    head_norms: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    table: str = ""
    at_once: int = 0
    limit: Limit = _COMPUTED

    @property
    def is_product(self) -> bool:
        """Whether it multiplies a vector by matrices."""
        return bool(self.matrices) or self.gives is Vector.LOGITS

    @property
    def ends_module(self) -> bool:
        """Whether it adds to the residual, and so exchanges messages between lanes."""
        return self.place is Place.LAYER and self.gives is Vector.RESIDUAL

    def tensors(self, config: "ModelConfig") -> tuple[str, ...]:
        """The checkpoint's tensors without the biases, in the order in which the op reads them;
        names within the layer.
        """
        names = [self.norm, *self.matrices, *(self.head_norms if config.has_qk_norm else ())]
        names.append("embedding" if self.table == "head" and config.is_tied else self.table)
        return tuple(name for name in names if name)


def _head_width(heads: Callable[["ModelConfig"], int]) -> Callable[["ModelConfig"], int]:
    """The values of so many heads over all lanes, for one lane."""
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
        oracle="exchange",
        takes=Vector.ACTS,
        gives=Vector.RESIDUAL,
        width=lambda c: c.hidden,
        matrices=("w2",),
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
        # With more, their sums would take room from the ring of weights.
        at_once=8,
    ),
)

KINDS = {kind.name: kind for kind in _ALL}
"""By name, in the program's order."""
IN_LAYER = tuple(kind for kind in _ALL if kind.place is Place.LAYER)
PRODUCTS = tuple(kind.name for kind in _ALL if kind.is_product)
"""The ops that multiply, in the program's order. The monokernel numbers them so."""
BIASES = {kind.name: kind.biases for kind in _ALL if kind.biases}
"""Kinds of ops whose products may have biases -> the biases, in the order of the op's matrices."""
MODULES = tuple(kind for kind in IN_LAYER if kind.ends_module)
"""The ops that end a layer's modules."""
ATTENTION, MLP = range(len(MODULES))


def module_of(kind: OpKind) -> int:
    """The number of the module that an op of a layer belongs to, within the layer."""
    before = IN_LAYER[: IN_LAYER.index(kind)]
    return sum(each.ends_module for each in before)


def products_of_module(module: int) -> tuple[str, ...]:
    """The ops of a layer's module, ATTENTION or MLP, that multiply."""
    return tuple(kind.name for kind in IN_LAYER if kind.is_product and module_of(kind) == module)
