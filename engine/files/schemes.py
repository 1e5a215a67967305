"""Describes how quantised matrices are stored, and reads single fields of config.json.

quantization.py uses these to read each method of quantisation.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import kccl

from ..base.fields import Fields, shown
from .patterns import LINEAR, REGEX, is_match

FIELD = "quantization_config"
SMALLEST_GROUP = 32
"""The columns of the smallest group with a scale."""
# The largest number of rows or columns that may share a scale.
_MOST_SHARED = (1 << 31) - 1


class Layout(Enum):
    """The layouts of a matrix's tensors. quantized_layouts.py and float4_layouts.py read them."""

    E4M3 = "8-bit floats in `weight`"
    INT8 = "8-bit integers in `weight`"
    PACKED4 = "4-bit integers in `weight_packed`"
    PACKED8 = "8-bit integers in `weight_packed`"
    AWQ = "4-bit integers in AWQ's `qweight`"
    GPTQ = "4-bit integers in GPTQ's `qweight`"
    GPTQ8 = "8-bit integers in GPTQ's `qweight`"
    MXFP4 = "4-bit floats in `weight_packed`, with powers of two as scales"
    NVFP4 = "4-bit floats in `weight_packed`, with scales and a divisor of these"
    MODELOPT4 = "4-bit floats in `weight`, with scales and a factor of these"


@dataclass(frozen=True)
class Scheme:
    """How a matrix is stored.

    Attributes:
        layout: The layout of its tensors.
        scale: The names that the tensor of scales may have. The file has one of these.
        rows: How many rows share a scale. 0 means all of them.
        columns: How many columns share a scale. 0 means all of them.
        has_zeros: Whether there is a zero point for each scale.
        zero_offset: The number to add to a stored zero point.
    """

    layout: Layout
    scale: tuple[str, ...]
    rows: int
    columns: int
    has_zeros: bool = False
    zero_offset: int = 0


class Quantization:
    """What config.json says about how each matrix is stored.

    Attributes:
        path: The file, for messages.
        rounds_activations: To how many bits the file asks to round activations before a product;
            0: it does not ask. The engine does not round them.
        is_head_open: Whether the head may be unquantised although it has a scheme. Then its dtype
            decides.
    """

    def __init__(
        self,
        path: Path,
        schemes: Sequence[tuple[str, Scheme]],
        is_ignored: Callable[[str], bool],
        *,
        rounds_activations: int,
        is_head_open: bool = False,
    ) -> None:
        """Stores the schemes.

        Args:
            path, rounds_activations, is_head_open: See the attributes.
            schemes: (target, scheme) pairs. A target is "Linear", a module's name, or "re:" and a
                regular expression.
            is_ignored: Tells whether a module is not quantised.
        """
        self.path = path
        self.rounds_activations = rounds_activations
        self.is_head_open = is_head_open
        # The first target that matches decides. As in compressed-tensors, names come before
        # patterns, and patterns before classes ("Linear").
        self._schemes = sorted(
            schemes, key=lambda each: (each[0] == LINEAR, each[0].startswith(REGEX), each[0])
        )
        self._is_ignored = is_ignored

    def scheme_of(self, module: str) -> Scheme | None:
        """Returns how the weight of a linear layer is stored. Returns None if that is in 16 or 32
        bits.

        Args:
            module: The layer's name in transformers, as in "model.layers.0.mlp.up_proj".
        """
        if self._is_ignored(module):
            return None
        found = (scheme for target, scheme in self._schemes if is_match(target, module))
        return next(found, None)

    def check_targets(self, modules: Collection[str]) -> None:
        """Checks that each target that is a name names a linear layer of the model.

        Raises:
            kccl.Error: A target names none.
        """
        for target, _ in self._schemes:
            if not target.startswith(REGEX) and target != LINEAR and target not in modules:
                raise kccl.Error(
                    f"{self.path}: {FIELD} has the target {shown(target)}, must be {LINEAR!r}, a "
                    f"linear layer of the model, or a pattern behind {REGEX!r}"
                )


# ---- Fields -------------------------------------------------------------------------------------


def refuse(fields: Fields, names: Sequence[str]) -> None:
    """Raises kccl.Error if one of the fields is there and not empty."""
    for name in names:
        if fields.value(name) not in (None, False, "", [], {}):
            raise fields.wrong(name, "absent: the engine does not honour it")


def only(fields: Fields, name: str, wanted: int, *others: str) -> None:
    if fields.integer(name, *others) != wanted:
        raise fields.wrong((name, *others), f"{wanted}")


def group_size(fields: Fields, *names: str) -> int:
    """Returns the columns of a group. Returns 0 if a row is one group, for which files have -1."""
    size = fields.integer(*names)
    if size != -1 and (not 0 < size <= _MOST_SHARED or size % SMALLEST_GROUP):
        raise fields.wrong(names, f"a multiple of {SMALLEST_GROUP} below 2^31, or -1")
    return max(size, 0)


def block(fields: Fields, name: str) -> tuple[int, int]:
    """Returns the rows and columns of a block, which has one scale. The field is a list of two
    sizes, or a text as "128x128".
    """
    value = fields.value(name)
    if isinstance(value, str):
        value = [
            int(each) if each.isdecimal() and len(each) < 10 else 0 for each in value.split("x")
        ]
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not all(type(each) is int and 0 < each <= _MOST_SHARED for each in value):
        raise fields.wrong(name, "two sizes above 0")
    rows, columns = value
    if columns % SMALLEST_GROUP:
        raise fields.wrong(name, f"a pair whose second size is a multiple of {SMALLEST_GROUP}")
    return rows, columns
