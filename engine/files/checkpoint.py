"""A model on disk, opened: its configuration, its tensors under one set of names, its tokenizer.

Opening reads headers only, and compares every shape with the configuration. A tensor is read when
it is asked for, and is not kept.
"""

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.closing import Closing
from ..base.fields import shown
from ..model.config import is_vector
from ..text.tokenizer import Tokenizer
from .gguf import GgufSource
from .hf import FolderSource
from .source import Source

DTYPES: Mapping[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
"""What weights may be in memory."""
# Bits of 16-bit floats: a mask of all but the sign, and the smallest magnitude that is infinite or
# NaN.
_MAGNITUDE = 0x7FFF
_NOT_FINITE = {"bfloat16": 0x7F80, "float16": 0x7C00}
_MOST_BFLOAT16 = float(np.array(0x7F7F, np.uint16).view(ml_dtypes.bfloat16))
# Elements that are checked at a time, so that they are still in the cache.
_CHUNK = 1 << 16
# Elements of a matrix that are read at a time, where only some of its columns are wanted.
_READ = 1 << 18
# Axis of what is cut into lanes, where the file stores all lanes as one matrix or vector.
CUT_AXIS = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w3": 0, "w2": 1}
CUT_AXIS |= dict.fromkeys(("bq", "bk", "bv", "b1", "b3"), 0)


class Checkpoint(Closing):
    """An opened model. A context manager.

    Attributes:
        config: The model's configuration.
        source: Its folder or file, for messages.
        stored: How the file stores the matrices: one or several of "BF16", "F16",
            "F32" and GGUF's names.
        dtype: What they are read in: "bfloat16" or "float16".
    """

    def __init__(self, source: Source) -> None:
        """Checks all names and shapes. Weights that are all stored as F16 are read as they are, all
        others in BF16.

        Raises:
            kccl.Error: A tensor is missing, has another shape than the configuration says, or is
                not part of the model.
        """
        self.config = source.config
        self.source = source.path
        self._source: Source | None = source
        self._tokenizer: Tokenizer | None = None
        self._shapes = self.config.shapes()
        for name, shape in self._shapes.items():
            self._check(source, name, shape)
        superfluous = source.shapes.keys() - set(source.names.values()) - source.ignored
        if superfluous:
            name = min(superfluous)
            raise kccl.Error(
                f"{source.file_of(name)}: tensor {shown(name)} is not part of a "
                f"{self.config.family} model that the engine knows"
            )
        weights = [name for name in self._shapes if not is_vector(name)]
        self.stored = tuple(sorted({source.dtypes[source.names[name]] for name in weights}))
        self.dtype = "float16" if self.stored == ("F16",) else "bfloat16"

    def as_dtype(self, dtype: str) -> "Checkpoint":
        """Reads the same files with weights in another dtype, rounded to the nearest. What GGUF has
        quantised is rounded to BF16 first.

        Raises:
            InvalidArgument: `dtype` is neither "bfloat16" nor "float16".
        """
        if dtype not in DTYPES:
            names = ", ".join(map(repr, DTYPES))
            raise kccl.InvalidArgument(f"dtype is {dtype!r}, must be one of {names}")
        other = copy.copy(self)
        other.dtype = dtype
        return other

    def _check(self, source: Source, name: str, shape: tuple[int, ...]) -> None:
        in_file = source.names[name]
        if in_file not in source.shapes:
            raise kccl.Error(f"{source.path}: tensor {in_file} is missing")
        found, wanted = source.shapes[in_file], self._shape_in_file(name, shape)
        if found != wanted:
            raise kccl.Error(
                f"{source.file_of(in_file)}: tensor {in_file} has shape {list(found)}, must have "
                f"{list(wanted)} by the model's configuration"
            )

    def _shape_in_file(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a tensor must have in the file."""
        if self._opened().is_stacked:
            is_cut_head = name == "head" and self.config.lm_head == "vocab_parallel"
            lanes = self.config.num_lanes
            return (lanes, shape[0] // lanes, shape[1]) if is_cut_head else shape
        axis = CUT_AXIS.get(name.rpartition(".")[2])
        if axis is None:
            return shape
        lanes, *matrix = shape
        matrix[axis] *= lanes
        return tuple(matrix)

    def names(self) -> tuple[str, ...]:
        """The names of all tensors, as ModelConfig.shapes() gives them."""
        return tuple(self._shapes)

    def tensor(self, name: str, lanes: range | None = None) -> NDArray[Any]:
        """Reads a tensor, or some lanes of it.

        Args:
            name: One of names().
            lanes: Of a matrix that is cut into lanes; None: the whole tensor.

        Returns:
            An array of the shape that config.shapes() gives, lanes left out: a norm's weights and
            biases in FP32, all others in `dtype`, to which what the file holds is rounded.

        Raises:
            InvalidArgument: There is no such tensor, or it has no such lanes.
            kccl.Error: The file cannot be read, or the tensor has a NaN, an infinity, or a weight
                that `dtype` cannot hold.
        """
        shape = self._shape(name)
        in_file = self._opened().shapes[self._opened().names[name]]
        axis = CUT_AXIS.get(name.rpartition(".")[2])
        if lanes is None:
            lanes = range(shape[0]) if axis is not None else range(1)
        elif axis is None or not 0 <= lanes.start <= lanes.stop <= shape[0] or lanes.step != 1:
            raise kccl.InvalidArgument(f"{name} has no lanes {lanes} that can be read")
        if axis is None:
            return self._read(name, 0, in_file[0]).reshape(shape)
        if self._opened().is_stacked or axis == 0:
            # Rows of the file's first axis in a lane.
            each = in_file[0] // shape[0]
            read = self._read(name, lanes.start * each, lanes.stop * each)
            return read.reshape(len(lanes), *shape[1:])
        _, rows, columns = shape
        found = np.empty((len(lanes), rows, columns), DTYPES[self.dtype])
        at_once = max(1, _READ // in_file[1])
        for start in range(0, rows, at_once):
            stop = min(start + at_once, rows)
            read = self._read(name, start, stop).reshape(stop - start, shape[0], columns)
            found[:, start:stop] = read[:, lanes.start : lanes.stop].transpose(1, 0, 2)
        return found

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Reads some rows of "embedding" or "head", which are too large to be read at once.

        Returns:
            [stop - start, hidden] in `dtype`.

        Raises:
            InvalidArgument: There are no such rows.
            kccl.Error: As tensor().
        """
        num_rows, columns = self._shape(name) if name in ("embedding", "head") else (0, 0)
        if not 0 <= start <= stop <= num_rows:
            raise kccl.InvalidArgument(f"{name} has no rows {start} to {stop} that can be read")
        # Rows of an entry of the file's first axis: more than one if that is the lane.
        each = num_rows // self._opened().shapes[self._opened().names[name]][0]
        first = start // each
        read = self._read(name, first, -(-stop // each)).reshape(-1, columns)
        return read[start - first * each : stop - first * each]

    def _read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        source = self._opened()
        in_file = source.names[name]
        read = source.read(in_file, start, stop)
        # NaN, and values that the dtype cannot hold, are found below.
        with np.errstate(all="ignore"):
            dtype = np.float32 if is_vector(name) else DTYPES[self.dtype]
            rounded = read.astype(dtype, copy=False)
        if not self._is_finite(rounded):
            told = self._why_not_finite(read.reshape(-1).astype(np.float32), rounded.reshape(-1))
            raise kccl.Error(f"{source.file_of(in_file)}: tensor {in_file} has {told}")
        return rounded

    def _why_not_finite(self, read: NDArray[np.float32], rounded: NDArray[Any]) -> str:
        """What a tensor has that is not finite: in its file, or when it is rounded."""
        if not np.isfinite(read).all():
            return "a weight that is NaN or infinite"
        value = float(read[~np.isfinite(rounded.astype(np.float32))][0])
        if self.dtype == "float16":
            most = "65504, the largest of float16: read it with dtype 'bfloat16'"
        else:
            most = f"{_MOST_BFLOAT16:.3g}, the largest of bfloat16, and no other dtype holds more"
        return f"a weight beyond {most}; it is {value:.5g}"

    def _is_finite(self, values: NDArray[Any]) -> bool:
        flat = values.reshape(-1)
        if values.dtype == np.float32:
            return bool(np.isfinite(flat).all())
        bits, not_finite = flat.view(np.uint16), _NOT_FINITE[self.dtype]
        magnitudes = np.empty(_CHUNK, np.uint16)
        for start in range(0, bits.size, _CHUNK):
            chunk = bits[start : start + _CHUNK]
            if np.bitwise_and(chunk, _MAGNITUDE, out=magnitudes[: chunk.size]).max() >= not_finite:
                return False
        return True

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise kccl.InvalidArgument(f"{self.source} has no tensor that is called {name!r} here")
        return self._shapes[name]

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer beside the weights, damaged or not."""
        return self._opened().has_tokenizer

    @property
    def mapped_bytes(self) -> int:
        """Bytes of address space, which the largest file takes while a tensor is read."""
        return self._opened().mapped_bytes

    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a text, where the files say so without their tokenizer.

        Raises:
            kccl.Error: They are no ids of the vocabulary.
        """
        return self._opened().end_ids()

    def tokenizer(self) -> Tokenizer:
        """The tokenizer beside the weights. It is read once.

        Raises:
            kccl.Error: There is none, it cannot be read, or texts become ids that the embedding
                does not have.
        """
        if self._tokenizer is None:
            tokenizer = self._opened().tokenizer()
            tokenizer.fit(self.config.vocab_size, self.source)
            self._tokenizer = tokenizer
        return self._tokenizer

    def _opened(self) -> Source:
        if self._source is None:
            raise kccl.Error(f"{self.source} was closed")
        return self._source

    def close(self) -> None:
        """Closes the files. May be called again."""
        if self._source is not None:
            self._source.close()
            self._source = None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a folder in Hugging Face's layout, or a GGUF file.

    Raises:
        kccl.Error: It cannot be read, it is damaged, or it holds a model that the engine does not
            know. Names the file, and the tensor or field.
    """
    path = Path(path)
    if not os.path.exists(path):
        raise kccl.Error(f"{path} does not exist")
    # To open a pipe would wait for who writes to it.
    if not os.path.isdir(path) and not os.path.isfile(path):
        raise kccl.Error(f"{path} is neither a folder nor a file")
    source: Source = FolderSource(path) if os.path.isdir(path) else GgufSource(path)
    try:
        return Checkpoint(source)
    except BaseException:
        source.close()
        raise
