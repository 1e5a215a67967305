"""Splits fused experts. Some folders, as gpt-oss's, have one tensor for the same matrix of all
experts. Here each expert's matrix or bias becomes a tensor of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..formats.base import Format, Stored
from ..formats.mxfp4 import MXFP4
from ..formats.table import IN_FILES
from ..model.config import ModelConfig, is_vector
from .hf_files import DTYPES as PLAIN_DTYPES
from .pairs import Pairs
from .source import CUT_AXIS
from .tensors import Tensors

_BYTES = ("U8",)
# Part of an expert -> (the tensor that has it, the part's first row in it, the stride of its rows).
_HOLDERS = {
    "w1": ("gate_up_proj", 0, 2),
    "w3": ("gate_up_proj", 1, 2),
    "w2": ("down_proj", 0, 1),
    "b1": ("gate_up_proj_bias", 0, 2),
    "b3": ("gate_up_proj_bias", 1, 2),
    "b2": ("down_proj_bias", 0, 1),
}


class ExpertPart:
    """A matrix or bias of one expert, within a tensor of all experts.

    Attributes:
        shape: Its shape.
        format: The format in which it is read.
        main: The name of the tensor that holds its numbers.
        uses: The names of all tensors that it is made of: `main`, and that of its scales.
        pairs: How a device makes it; None: it is read.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        stored_in: Format,
        uses: tuple[str, ...],
        read: Callable[[int, int], NDArray[Any]],
        pairs: Pairs | None = None,
    ) -> None:
        """Makes a part. read(start, stop) returns its rows, or elements of a bias, as words of the
        format.
        """
        self.pairs = pairs
        self.shape, self.format, self.uses, self._read = shape, stored_in, {*uses}, read
        self.main = uses[0]

    def read(self, start: int, stop: int) -> Stored:
        """Returns the entries from start to stop - 1 of the first axis, in new memory.

        Raises:
            kccl.Error: A file cannot be read.
        """
        # Copies, because _read() returns views of an array that is kept for the next part.
        return Stored(self.format, np.array(self._read(start, stop), order="C"))


def find_fused(
    tensors: Tensors, config: ModelConfig, names: Mapping[str, str]
) -> dict[str, ExpertPart]:
    """Returns all experts' parts by their names in `names`. The folder has no tensors of these
    names.

    Args:
        tensors: The folder's tensors.
        config: The model's configuration.
        names: Tensor of ModelConfig.shapes() -> its name in the folder.

    Raises:
        kccl.Error: A tensor is missing, or has another dtype or shape than it must have.
    """
    found = {}
    for own, shape in config.shapes().items():
        _, is_expert, rest = own.partition(".experts.")
        if is_expert:
            expert, _, part = rest.partition(".")
            before, _, _ = names[own].partition(f"experts.{expert}.")
            whole = list(shape)
            if part in CUT_AXIS:
                lanes, *whole = whole
                whole[CUT_AXIS[part]] *= lanes
            found[names[own]] = _part(
                tensors, config, f"{before}experts.", part, int(expert), tuple(whole)
            )
    return found


def _part(
    tensors: Tensors,
    config: ModelConfig,
    before: str,
    part: str,
    expert: int,
    shape: tuple[int, ...],
) -> ExpertPart:
    assert config.experts is not None
    num = config.experts.num
    holder, first, step = _HOLDERS[part]
    name, rows = before + holder, shape[0] * step
    if is_vector(part):
        tensors.check(name, PLAIN_DTYPES, (num, rows))
        return _plain(tensors, name, expert, shape, lambda read: read[first::step])
    blocks, scales = f"{name}_blocks", f"{name}_scales"
    if blocks not in tensors.held:
        columns = shape[1]
        tensors.check(name, PLAIN_DTYPES, (num, columns, rows))
        return _plain(tensors, name, expert, shape, lambda read: read[:, first::step].T)
    groups = shape[1] // MXFP4.block
    tensors.check(blocks, _BYTES, (num, rows, groups, MXFP4.block // 2))
    tensors.check(scales, _BYTES, (num, rows, groups))

    def made() -> NDArray[Any]:
        read = (tensors.read(each, slice(expert, expert + 1))[0] for each in (blocks, scales))
        return MXFP4.from_pairs(*read)

    def words(start: int, stop: int) -> NDArray[Any]:
        # The tensor is kept until another one is read: w3 is read right after w1, from the same
        # tensor.
        return tensors.kept(f"{name} {expert}", made)[first::step][start:stop]

    def pairs(start: int, stop: int) -> tuple[NDArray[Any], NDArray[Any]]:
        some = slice(expert * rows + start, expert * rows + stop)
        numbers, of_blocks = (tensors.read_rows(each, some) for each in (blocks, scales))
        return numbers.reshape(-1, groups, MXFP4.block // 2), of_blocks.reshape(-1, groups)

    return ExpertPart(shape, MXFP4, (blocks, scales), words, Pairs(pairs, step))


def _plain(
    tensors: Tensors,
    name: str,
    expert: int,
    shape: tuple[int, ...],
    part_of: Callable[[NDArray[Any]], NDArray[Any]],
) -> ExpertPart:
    """Returns a part that is not quantised. part_of() cuts it out of the expert's whole tensor,
    which is kept until another one is read.
    """
    stored_in = IN_FILES[tensors.held[name][0]]

    def words(start: int, stop: int) -> NDArray[Any]:
        whole = tensors.kept(
            f"{name} {expert}", lambda: tensors.read(name, slice(expert, expert + 1))[0]
        )
        return part_of(whole.view(stored_in.word))[start:stop]

    return ExpertPart(shape, stored_in, (name,), words)
