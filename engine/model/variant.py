"""Variants of the decode kernel that leave a part out, to learn what it costs."""

from dataclasses import dataclass

import kccl

from ..base.core import lib
from .ops import PRODUCTS

PINS = tuple(f"pin:{product}" for product in PRODUCTS)
# Names of the parts, and their bits of KcclDecodeAblation.
_LEFT_OUT: dict[str, int] = {
    "exchanges": lib.kKcclDecodeNoExchanges,
    "weights": lib.kKcclDecodeNoWeights,
    "attention": lib.kKcclDecodeNoAttention,
}
_PINNED: int = lib.kKcclDecodePinned
_LEFT_OUT |= {pin: _PINNED << index for index, pin in enumerate(PINS)}
_NUMBERS = ("in-flight", "stage-steps")


@dataclass(frozen=True)
class Variant:
    """A decode kernel.

    Attributes:
        name: The name, as parse() takes it.
        ablated, in_flight, stage_steps: As in Tuning; 0: the usual value.
        traces: Whether it records the times of its ops.
    """

    name: str = "none"
    ablated: int = 0
    in_flight: int = 0
    stage_steps: int = 0
    traces: bool = False

    @property
    def has_races(self) -> bool:
        """Tells whether the kernel reads memory that others may be writing. The simulator refuses
        that.
        """
        return self.ablated & _LEFT_OUT["exchanges"] != 0

    @property
    def pins(self) -> bool:
        """Tells whether it reads the stages of a product from one place."""
        return self.ablated >= _PINNED


USUAL = Variant()
TRACING = Variant(traces=True)


def parse(name: str) -> Variant:
    """Returns a variant by its name: "none", or the parts that are left out or changed, joined by
    "+".

    Args:
        name: Parts are "exchanges" (reads vectors without waiting for them), "weights" (copies
            none), "attention" (sees its own position only), "pin:P" (takes every stage of the
            product P, a name in ops.PRODUCTS, from the same place, so that it comes from the
            cache), "in-flight=N" (at most N stages are copied at the same time) and "stage-steps=N"
            (tiles of each warp in a stage). Without a ring of weights there is no pin:P and no
            in-flight=N, which monokernel/tuning.py says.

    Raises:
        InvalidArgument: There is no such variant.
    """
    ablated, numbers = 0, dict.fromkeys(_NUMBERS, 0)
    for part in () if name == USUAL.name else name.split("+"):
        key, _, value = part.partition("=")
        if part in _LEFT_OUT:
            ablated |= _LEFT_OUT[part]
        elif key in numbers and value.isdecimal() and int(value) > 0:
            numbers[key] = int(value)
        else:
            known = [USUAL.name, *_LEFT_OUT, *(f"{number}=N" for number in _NUMBERS)]
            raise kccl.InvalidArgument(
                f"{part!r} cannot be left out or changed, must be one of {', '.join(known)}"
            )
    return Variant(name, ablated, numbers["in-flight"], numbers["stage-steps"])
