"""Writes the sequence of a model's ops as C++ for the monokernel: kernels/sequence.cuh."""

from collections.abc import Iterable, Sequence

from ..formats.base import Format
from ..model.ops import IN_LAYER, KINDS, MODULES, OpKind, Place, Vector, products_in
from ..model.program import Program
from .layout import head_of, products_of
from .shape import Tuning


def sequence_of(program: Program, tuning: Tuning) -> str:
    """Returns the struct Ops, which sequence.cuh describes."""
    layer = _layer_of(program)
    products = [kind.name for kind in layer if kind.is_product]
    named = products_in(program.config)
    (head,) = (KINDS[name] for name in named if name not in products)
    rows = [_row(kind, program) for kind in layer]
    matrices = ", ".join(f"typename D::{name_of(product)}" for product in products)
    strips = {
        each.kind: each.strip_tiles(tuning.warps, tuning.strip_tiles)
        for each in (*products_of(program, 1), head_of(program))
    }
    formats = {
        name: type_of(program.format_of(name), strips.get(name, 1)) for name in (*named, "embed")
    }
    distinct = ", ".join(dict.fromkeys(formats[name] for name in named))
    # Shape names the matrices of all dense products. A mixture has none of the MLP's, and nothing
    # asks for their sizes.
    lacking = {kind.name: "void" for kind in IN_LAYER if kind.is_product and kind not in layer}
    aliases = [
        f"using {name_of(name)}Format = {each};" for name, each in (formats | lacking).items()
    ]
    return f"""
struct Ops {{
    enum class Vector : uint32_t {{ {_enumerators(vector.value for vector in Vector)} }};
    enum class Product : uint32_t {{ {_enumerators([*products, head.name])}, kNone }};
    static constexpr kccl::decode::Op<Vector, Product> kLayer[] = {{
        {(chr(10) + "        ").join(rows)}
    }};
    static constexpr uint32_t kNumOps = {len(layer)};
    static constexpr uint32_t kNumProducts = {len(products)};
    static constexpr uint32_t kNumModules = {len(MODULES)};
    static constexpr uint32_t kHeadTiles = {head.at_once};
    {(chr(10) + "    ").join(aliases)}
    using Formats = kccl::decode::FormatList<{distinct}>;
    template <class D>
    using Products = kccl::decode::Matrices<{matrices}>;
}};
"""


def formats_of(program: Program) -> str:
    """Returns the lines that include the formats of the model's products and of its embedding."""
    formats = [program.format_of(name) for name in (*products_in(program.config), "embed")]
    names = sorted({each.family or each.name for each in formats})
    return "\n".join(f'#include "formats/{name}.cuh"' for name in names)


def cases_of(program: Program) -> str:
    """Returns the macro that makes the kernels' switches over products: sequence.cuh."""
    cases = (f"CASE({name_of(kind.name)})" for kind in _layer_of(program) if kind.is_product)
    return f"#define KCCL_OF_PRODUCTS(CASE) {' '.join(cases)}"


def name_of(kind: str) -> str:
    """Returns the name of a kind of op in the kernels, as in "GateUp"."""
    return "".join(map(str.capitalize, kind.split("_")))


def type_of(stored_in: Format, strip_tiles: int) -> str:
    """Returns the kernels' type of a format, whose strips have so many tiles."""
    name = f"kccl::decode::{name_of(stored_in.family or stored_in.name)}"
    if not stored_in.scale_bytes:
        return name
    return f"{name}<{stored_in.block}, {strip_tiles}{', true' if stored_in.has_zeros else ''}>"


def _layer_of(program: Program) -> Sequence[OpKind]:
    """Returns the ops of a layer in their order, which is the same in all layers."""
    ops = [op for op in program.ops if KINDS[op.kind].place is Place.LAYER]
    layers = {
        tuple(op.kind for op in ops if op.layer == layer)
        for layer in range(program.config.num_layers)
    }
    (layer,) = layers
    return [KINDS[kind] for kind in layer]


def _row(kind: OpKind, program: Program) -> str:
    product = name_of(kind.name) if kind.is_product else "None"
    assert kind.takes is not None
    vectors = (f"Vector::k{vector.value.title()}" for vector in (kind.takes, kind.gives))
    has_bias = str(kind.name in program.config.biases).lower()
    return f"{{Product::k{product}, {', '.join(vectors)}, {has_bias}}},"


def _enumerators(names: Iterable[str]) -> str:
    return ", ".join(f"k{name_of(name)}" for name in names)
