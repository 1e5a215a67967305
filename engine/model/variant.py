"""Variants of the decode kernel that leave a part of the work out, to measure what it costs."""

from dataclasses import dataclass

import kccl

from ..base.core import lib
from .ops import PRODUCTS

PINS = tuple(f"pin:{product}" for product in PRODUCTS)
# Name of a part of the kernel -> the bit of KcclDecodeAblation that leaves it out.
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
    """A decode kernel: the usual one, or one that leaves out or changes a part of the work.

    Attributes:
        name: The name, as parse() takes it.
        ablated, in_flight, stage_steps: As in Tuning (monokernel/shape.py). 0 stands for the usual
            value.
        traces: Whether the kernel records the times of its ops (timeline.py).
    """

    name: str = "none"
    ablated: int = 0
    in_flight: int = 0
    stage_steps: int = 0
    traces: bool = False

    @property
    def has_races(self) -> bool:
        """Tells whether the kernel has data races, because it reads vectors without waiting for
        them. The simulator refuses such a kernel.
        """
        return self.ablated & _LEFT_OUT["exchanges"] != 0

    @property
    def pins(self) -> bool:
        """Tells whether the variant has a part "pin:P", as parse() explains."""
        return self.ablated >= _PINNED


USUAL = Variant()
TRACING = Variant(traces=True)


def parse(name: str) -> Variant:
    """Returns a variant by its name: "none", or the parts that are left out or changed, joined by
    "+".

    Args:
        name: The parts are: "exchanges": reads vectors without waiting for them. "weights": copies
            no weights. "attention": a position sees itself only. "pin:P": reads every stage of the
            product P, a name in ops.PRODUCTS, from the same address, so that it comes from the
            cache. "in-flight=N": copies at most N stages at the same time. "stage-steps=N": a
            stage has N tiles for each warp. A kernel without a ring of weights supports neither
            pin:P nor in-flight=N: monokernel/tuning.py refuses them.

    Raises:
        InvalidArgument: A part is not one of these.
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
