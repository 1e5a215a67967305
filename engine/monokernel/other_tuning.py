"""The tunings of kernels other than the usual one: variants, and kernels with seats."""

from dataclasses import replace

import kccl

from ..model.program import Program
from ..model.variant import USUAL, Variant
from .layout import head_of, least_tile_bytes, products_of
from .shape import Tuning


def with_variant(program: Program, usual: Tuning, variant: Variant) -> Tuning:
    """Returns the tuning of a variant of the decode kernel. The usual kernel still fills the cache
    in chunks.

    Raises:
        InvalidArgument: The variant is of a ring of weights, and the tuning has none; or of one
            product, and the model has experts; or a stage of a product would end within a strip.
    """
    if variant == USUAL:
        return usual
    if usual.weights_in_registers:
        _check_without_ring(variant)
    if program.config.experts is not None:
        _check_with_experts(variant)
    if variant.stage_steps:
        _check_stages(program, usual, variant.stage_steps)
    return replace(
        usual,
        chunk=1,
        ablated=variant.ablated,
        stage_steps=variant.stage_steps or usual.stage_steps,
        in_flight=variant.in_flight or usual.in_flight,
        urgent_in_flight=variant.in_flight or usual.urgent_in_flight,
    )


def with_seats(program: Program, usual: Tuning) -> Tuning:
    """Returns the tuning of kernels with seats (kernels/seats.cuh). The vectors of several requests
    take most of a block's shared memory. So a stage of weights is half as long where it can be.
    """
    steps = usual.stage_steps // 2
    if usual.seats == 1 or usual.stage_steps % 2 or _broken(program, usual, steps):
        return usual
    flying, urgent = 2 * usual.in_flight, 2 * usual.urgent_in_flight
    return replace(usual, stage_steps=steps, in_flight=flying, urgent_in_flight=urgent)


def _check_stages(program: Program, usual: Tuning, steps: int) -> None:
    for kind, own, strip in _broken(program, usual, steps):
        raise kccl.InvalidArgument(
            f"stage-steps={steps} gives a stage of {kind} {own} tiles for each warp, must "
            f"give a multiple of {strip}, the tiles that share scales"
        )


def _broken(program: Program, usual: Tuning, steps: int) -> list[tuple[str, int, int]]:
    """Returns the products of which a stage would end within a strip: their kinds, the tiles of a
    stage, and those of a strip.
    """
    least, found = least_tile_bytes(program), []
    for each in (*products_of(program, 1), head_of(program)):
        own = each.stage_steps(steps, least)
        strip = each.strip_tiles(usual.warps, usual.strip_tiles)
        if own % strip:
            found.append((each.kind, own, strip))
    return found


def _check_with_experts(variant: Variant) -> None:
    if variant.pins:
        raise kccl.InvalidArgument(
            "pin:P is of a product with one matrix, and a mixture of experts has one for each"
        )


def _check_without_ring(variant: Variant) -> None:
    for is_asked, what in (
        (variant.traces, "a timeline"),
        (variant.in_flight, "in-flight=N"),
        (variant.pins, "pin:P"),
    ):
        if is_asked:
            raise kccl.InvalidArgument(
                f"{what} is of stages in a ring, and this device has its weights in registers"
            )
