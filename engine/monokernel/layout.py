"""Lists a rank's products in the order of its weight stream, with their sizes.

The packer, the tuning and the checks of memory read it. Where the tiles of a product lie within the
stream follows from it by kernels/shape.cuh, which the kernels share; packed_bytes() has the sum.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from ..base.core import lib
from ..formats.base import Format
from ..model.ops import KINDS, Place, layer_of, products_in
from ..model.program import Program

TILE: int = lib.kKcclDecodeTileRows


def _rounded_up(num: int, unit: int) -> int:
    return -(-num // unit) * unit


@dataclass(frozen=True)
class Product:
    """One matrix, as the monokernel packs it; or the matrices of all experts that a token uses.

    Attributes:
        kind: The op's kind.
        rows: Rows of the matrix. Those of several experts lie below each other.
        columns: The columns of one lane and expert.
        lanes: The lanes whose columns lie side by side, because they add to one residual. Each of
            several experts counts.
        format: The format in which it is stored.
        unit: Each warp has a multiple of so many tiles of a row tile and lane.
    """

    kind: str
    rows: int
    columns: int
    lanes: int
    format: Format
    unit: int = 1

    @property
    def nbytes(self) -> int:
        """Returns the bytes of the matrix as it is stored."""
        return self.format.bytes_of(self.rows * self.columns * self.lanes)

    def steps(self, warps: int, most: int) -> int:
        """Returns the tiles of a row tile and lane that each of so many warps has: whole strips.

        Args:
            warps, most: As strip_tiles() takes them.
        """
        return _rounded_up(self._least_steps(warps), self.strip_tiles(warps, most))

    def strip_tiles(self, warps: int, most: int) -> int:
        """Returns the tiles of a strip, which share the scales of their rows: all strips of a warp
        are equally long, and none crosses the border of a group of columns. 1 without scales.

        Longer strips have fewer scales, but may need more tiles of zeros. For the products that end
        modules, returns the length with the fewest bytes, and of several such lengths the longest
        one. With minimums, whose strips cost a warp more than their bytes, returns the longest one
        that makes at most a sixth of the tiles more. Other products get no tiles of zeros for their
        strips: they share the residual, so all of them have the same steps.

        Args:
            warps: The warps whose parts of the columns are cut into strips.
            most: Tuning.strip_tiles.
        """
        if not self.format.scale_bytes:
            return 1
        of_group = gcd(self.format.block // TILE, most)
        if not KINDS[self.kind].ends_module:
            return gcd(of_group, self._least_steps(warps))
        lengths = [num for num in range(of_group, 0, -1) if of_group % num == 0]
        least = self._least_steps(warps)
        if self.format.has_minimums:
            return next(num for num in lengths if 6 * _rounded_up(least, num) <= 7 * least)

        def nbytes(length: int) -> int:
            strips = _rounded_up(least, length) // length
            scales = self.format.strip_scale_bytes(length)
            return strips * (length * self.format.tile_bytes + scales)

        return min(lengths, key=nbytes)

    def packed_bytes(self, warps: int, most: int) -> int:
        """Returns the bytes of its tiles and their scales, including zeros that make all warps'
        parts equally long. The arguments are those of strip_tiles().
        """
        tiles = self.rows // TILE * self.lanes * self.steps(warps, most) * warps
        strip = self.strip_tiles(warps, most)
        scales = self.format.strip_scale_bytes(strip)
        return tiles * self.format.tile_bytes + tiles // strip * scales

    def stage_steps(self, steps: int, least: int) -> int:
        """Returns the tiles that a stage of the product has for each warp (kStageStepsOf in
        kernels/format.cuh).

        Args:
            steps: Tuning.stage_steps.
            least: What least_tile_bytes() returns.
        """
        most = max(1, steps * least // self.format.tile_bytes)
        # Other sizes are powers of two apart. A power of two has whole strips.
        return most if self.format.tile_bytes % least == 0 else 1 << most.bit_length() - 1

    def _least_steps(self, warps: int) -> int:
        """Returns the steps if strips did not matter."""
        return _rounded_up(-(-self.columns // (TILE * warps)), self.unit)


@dataclass(frozen=True)
class Piece:
    """A product's place among those of a rank.

    Attributes:
        product: The matrix.
        layer: Its layer; the head's is the number of layers.
        group: The lane group that multiplies it; or its expert, where all lanes are one group.
        lanes: The lanes whose matrices it has. For the head these are its parts, or the rank.
        number: The product's number in the kernels.
    """

    product: Product
    layer: int
    group: int
    lanes: range
    number: int


def products_of(program: Program, num_lanes: int) -> Iterator[Product]:
    """Returns the products of a layer, in the order of the program, for a group of so many
    lanes. One with experts has the matrices of all that a token uses.
    """
    config = program.config
    shapes = config.layer_shapes()
    unit = step_unit(program)
    for kind in (each for each in layer_of(config) if each.is_product):
        # All experts have matrices of the same shapes.
        names = kind.tensors_of_one(config)
        rows, columns = sum(shapes[name][-2] for name in names), shapes[names[0]][-1]
        stored_in = program.format_of(kind.name)
        if len(shapes[names[0]]) == 2:
            # It is not cut into lanes. Rows of zeros are added to whole tiles.
            yield Product(kind.name, _rounded_up(rows, TILE), columns, 1, stored_in, unit)
            continue
        own = unit if columns == config.hidden else 1
        places = config.experts.chosen if kind.has_experts and config.experts else 1
        if kind.ends_module:
            yield Product(kind.name, rows, columns, num_lanes * places, stored_in, own)
        else:
            yield Product(kind.name, num_lanes * places * rows, columns, 1, stored_in, own)


def step_unit(program: Program) -> int:
    """Returns the number of which the steps of a product that multiplies the residual are a
    multiple (kStepUnit in kernels/shape.cuh). All of them have equally many. It is 2 if experts
    have scales and 4 bits, so that two tiles share scales.
    """
    if program.config.experts is None:
        return 1
    stored_in = program.format_of("expert_gate_up")
    has_4_bits = stored_in.tile_bytes <= TILE * TILE // 2
    return gcd(stored_in.block // TILE, 2) if stored_in.scale_bytes and has_4_bits else 1


def is_in_place(program: Program, product: Product) -> bool:
    """Tells whether stages of a product of experts are multiplied where they lie in the ring
    (kIsInPlace in kernels/product_in_place.cuh): only such products have its format, and the format
    has scales.
    """
    others = (kind for kind in products_in(program.config) if not KINDS[kind].has_experts)
    is_shared = any(program.format_of(kind) == product.format for kind in others)
    return bool(product.format.scale_bytes) and not is_shared


def of_one_expert(product: Product, places: int) -> Product:
    """Returns the part of a product that one of `places` experts has."""
    if KINDS[product.kind].ends_module:
        return replace(product, lanes=product.lanes // places)
    return replace(product, rows=product.rows // places)


def head_of(program: Program, world_size: int = 1) -> Product:
    """Returns the head's product: a part of the head, or a rank's rows."""
    c, parts = program.config, program.num_head_parts
    rows = c.vocab_size // (parts if parts > 1 else world_size)
    return Product("head", rows, c.hidden, 1, program.format_of("head"), step_unit(program))


def groups_of(program: Program, lanes: range) -> list[range]:
    """Returns the lanes of each of a rank's residuals."""
    return [lanes] if program.num_residuals == 1 else [range(i, i + 1) for i in lanes]


def pieces(program: Program, rank: int, world_size: int) -> Iterator[Piece]:
    """Returns all products of a rank, in the order in which they are packed."""
    c, lanes = program.config, program.lanes_of(rank, world_size)
    numbers = products_in(c)
    groups = groups_of(program, lanes)
    of_group = [{each.kind: each for each in products_of(program, len(one))} for one in groups]
    for op in program.ops:
        kind = KINDS[op.kind]
        if not kind.is_product or kind.place is not Place.LAYER:
            continue
        number = numbers.index(op.kind)
        if kind.has_experts and c.experts is not None:
            product = of_one_expert(of_group[0][op.kind], c.experts.chosen)
            for expert in range(c.experts.num):
                yield Piece(product, op.layer, expert, lanes, number)
            continue
        for group, those in enumerate(groups):
            yield Piece(of_group[group][op.kind], op.layer, group, those, number)
    has_parts, head = program.num_head_parts > 1, head_of(program, world_size)
    for group, cut in enumerate(lanes if has_parts else range(rank, rank + 1)):
        yield Piece(head, c.num_layers, group, range(cut, cut + 1), numbers.index("head"))


def head_ids(program: Program, rank: int, world_size: int) -> range:
    """Returns the ids whose logits a rank computes, which are those of its rows of the head."""
    heads = [each for each in pieces(program, rank, world_size) if each.product.kind == "head"]
    rows = heads[0].product.rows
    return range(heads[0].lanes.start * rows, heads[-1].lanes.stop * rows)


def head_rows(program: Program, world_size: int) -> int:
    """Returns the most rows of the head that a rank has."""
    return max(len(head_ids(program, rank, world_size)) for rank in range(world_size))


def total_bytes(program: Program, rank: int, world_size: int) -> int:
    """Returns the bytes of all products of a rank as they are stored."""
    return sum(each.product.nbytes for each in pieces(program, rank, world_size))


def most_bytes(program: Program, world_size: int, *, of_experts: bool = False) -> int:
    """Returns the bytes of the largest product of any rank as it is stored, or of the largest one
    of experts; 0 if there is none.
    """
    return max(
        (
            each.product.nbytes
            for rank in range(world_size)
            for each in pieces(program, rank, world_size)
            if KINDS[each.product.kind].has_experts or not of_experts
        ),
        default=0,
    )


def packed_bytes(
    program: Program, rank: int, world_size: int, warps: int, strip_tiles: int = 1
) -> int:
    """Returns the bytes of a rank's weight stream, which do not depend on its number of blocks."""
    return sum(
        each.product.packed_bytes(warps, strip_tiles) for each in pieces(program, rank, world_size)
    )


def least_tile_bytes(program: Program) -> int:
    """Returns the bytes of a tile of the product whose tiles are smallest, without scales."""
    return min(program.format_of(kind).tile_bytes for kind in products_in(program.config))


def has_scales(program: Program) -> bool:
    """Tells whether a product's tiles have scales."""
    return any(program.format_of(kind).scale_bytes for kind in products_in(program.config))


def stage_bytes(program: Program, warps: int, steps: int, strip_tiles: int = 1) -> int:
    """Returns the bytes of a stage of weights of the product whose stages are largest: those of
    smaller tiles have more steps (kStageStepsOf in kernels/format.cuh).

    Args:
        program: The model's program.
        warps, steps, strip_tiles: As Tuning has them.
    """
    least = least_tile_bytes(program)

    def of(each: Product) -> int:
        own, strip = each.format, each.strip_tiles(warps, strip_tiles)
        each_tile = own.tile_bytes + own.strip_scale_bytes(strip) // strip
        return each.stage_steps(steps, least) * warps * each_tile

    return max(map(of, [*products_of(program, 1), head_of(program)]))
