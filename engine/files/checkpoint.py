"""Opens a model on disk: its configuration, its tensors under one set of names, its tokenizer.

Opening reads headers, and the small tensors that say how a matrix is stored. It compares every
shape with the configuration. A tensor is read when it is asked for, and is not kept.
"""

import copy
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.closing import Closing
from ..base.fields import shown
from ..formats.base import Format, Plain, Stored
from ..formats.float32 import FLOAT32
from ..formats.table import DTYPES, IN_FILES, MULTIPLIED, ON_HOST
from ..model.config import is_vector
from ..text.tokenizer import Tokenizer
from .defaults import Defaults
from .gguf import GgufSource
from .hf import FolderSource
from .kept import expanded, kept_formats, op_of, shown_format
from .rounded import is_rounded, rounded_formats, what_is_rounded
from .source import CUT_AXIS, Source

# The number of elements of a matrix that are read at a time, where only some of its columns are
# needed.
_READ = 1 << 18


class Checkpoint(Closing):
    """An opened model. It is a context manager.

    Attributes:
        config: The model's configuration.
        source: Its folder or file, for messages.
        stored: How the file stores the matrices: one or several of "BF16", "F16",
            "F32", GGUF's names, and those of quantised folders' forms, as in "INT4".
        dtype: The type to which matrices are converted: "bfloat16" or "float16".
        formats: The format of the matrices of each kind of op, by the kind's name in ops.KINDS; of
            those ops whose kind has several, by the op's name; and of those matrices that have
            another one than the first of their op, by the matrix's name. It is that of `dtype`,
            except where as_stored() keeps the file's format, or as_weights() rounds to another.
        weights: What as_weights() rounds to; "" without it.
    """

    def __init__(self, source: Source) -> None:
        """Checks all names and shapes. If all weights are stored as F16, they stay F16. Otherwise
        all are read as BF16.

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
        self._stored = {
            name: IN_FILES[source.dtypes[source.names[name]]]
            for name in self._shapes
            if not is_vector(name)
        }
        self.stored = tuple(sorted({shown_format(each) for each in self._stored.values()}))
        self.dtype = "float16" if self.stored == ("F16",) else "bfloat16"
        self._keeps: Collection[str] = ()
        self.weights = ""
        self.formats = self._formats_of(self._stored, ())

    def as_dtype(self, dtype: str) -> "Checkpoint":
        """Reads the same files with weights in another dtype, rounded to the nearest. Weights that
        a GGUF file has quantised are rounded to BF16 first.

        Raises:
            InvalidArgument: `dtype` is neither "bfloat16" nor "float16".
        """
        if dtype not in DTYPES:
            names = ", ".join(map(repr, DTYPES))
            raise kccl.InvalidArgument(f"dtype is {dtype!r}, must be one of {names}")
        other = copy.copy(self)
        other.dtype = dtype
        other._keeps = ()
        other.weights = ""
        other.formats = other._formats_of(self._stored, ())
        return other

    def as_stored(
        self, multiplied: Collection[str] = MULTIPLIED, *, is_alike: bool = False
    ) -> "Checkpoint":
        """Reads the same files, and keeps the stored format of each op whose matrices have one
        format that executors can multiply, and whose lanes have whole blocks. The other matrices
        are converted to `dtype`. So are those of a kind of op with several formats, unless they are
        formats of blocks, which may differ between layers. Queries, keys and values may have
        several of those formats.

        Args:
            multiplied: The names of these formats.
            is_alike: Whether each kind of op has one format all the same, as the monokernel needs.
        """
        other = copy.copy(self)
        other._keeps, other.weights = multiplied, ""
        other.formats = other._formats_of(self._stored, multiplied, is_alike=is_alike)
        return other

    def as_weights(self, weights: str) -> "Checkpoint":
        """Reads the same files, and rounds the matrices of layers to fewer bits: a group of columns
        has a scale, by which its largest number becomes the format's largest, and each weight is
        rounded to the nearest. Groups have 128 columns, or fewer where a lane has no whole ones.
        MXFP4 is rounded as its specification says. The embedding and the head stay in `dtype`.

        Args:
            weights: "fp8", "int8", "int4" or "mxfp4".

        Raises:
            InvalidArgument: There is no such format, the file has fewer bits already, or no lane
                has whole groups.
        """
        rounded = rounded_formats(weights, self._stored, self._shapes, str(self.source))
        other = copy.copy(self)
        other._keeps, other.weights = (), weights
        other.formats = other._formats_of(rounded, ON_HOST)
        return other

    def with_formats(self, formats: Mapping[str, Format]) -> "Checkpoint":
        """Reads the same files in the formats of another checkpoint of them."""
        other = copy.copy(self)
        other.formats = dict(formats)
        return other

    @property
    def rounded(self) -> tuple[str, ...]:
        """Returns how the file stores those matrices that are given in another format, as in
        `stored`.
        """
        return tuple(
            sorted(
                {
                    shown_format(each)
                    for name, each in self._stored.items()
                    if self.format_of(name).in_files != each.in_files
                    and not (self.weights and is_rounded(self.format_of(name), each))
                }
            )
        )

    @property
    def fewer_bits(self) -> tuple[str, ...]:
        """Returns sentences on what as_weights() rounds and what it leaves."""
        if not self.weights:
            return ()
        in_file = [self._opened().names[name] for name in self._stored]
        given = {name: self.format_of(name) for name in self._stored}
        return what_is_rounded(self.weights, self._stored, given, self._shapes, in_file)

    @property
    def expanded(self) -> tuple[str, ...]:
        """Returns sentences that say which blocks become numbers of 16 bits and why, where
        as_stored() keeps formats of blocks; none elsewhere.
        """
        given = {name: self.format_of(name) for name in self._stored}
        source = self._opened()
        names = {name: source.main_of(source.names[name]) for name in self._stored}
        return expanded(self._stored, given, self._shapes, names, self._keeps)

    def _formats_of(
        self, stored: Mapping[str, Format], keeps: Collection[str], *, is_alike: bool = False
    ) -> dict[str, Format]:
        found = kept_formats(stored, self._shapes, DTYPES[self.dtype], keeps, is_alike=is_alike)
        if self.config.is_tied:  # Embedding and head are one tensor.
            found["head"] = found["embed"]
        return found

    def format_of(self, name: str) -> Format:
        """Returns the format in which a tensor is given. A norm's weights and biases are FP32.

        Raises:
            InvalidArgument: There is no such tensor.
        """
        self._shape(name)
        if is_vector(name):
            return FLOAT32
        layer, kind = op_of(name)
        return self.formats.get(name) or self.formats.get(layer + kind) or self.formats[kind]

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
        """Returns the shape that a tensor must have in the file."""
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
        """Returns the names of all tensors, as ModelConfig.shapes() gives them."""
        return tuple(self._shapes)

    def tensor(self, name: str, lanes: range | None = None) -> NDArray[Any]:
        """Reads a tensor, or some lanes of it, and converts it to numbers as Format.values()
        does.
        """
        return self.read(name, lanes).values()

    def read(self, name: str, lanes: range | None = None) -> Stored:
        """Reads a tensor, or some lanes of it.

        Args:
            name: One of names().
            lanes: The lanes to read of a matrix that is cut into lanes; None: the whole tensor.

        Returns:
            A tensor of the shape that config.shapes() gives, without the lanes that are not read.
            Its format is format_of(); the file's numbers are rounded to it.

        Raises:
            InvalidArgument: There is no such tensor, or it has no such lanes.
            kccl.Error: The file cannot be read, or the tensor has a NaN, an infinity, or a weight
                that the format cannot hold.
        """
        shape = self._shape(name)
        in_file = self._opened().shapes[self._opened().names[name]]
        axis = CUT_AXIS.get(name.rpartition(".")[2])
        if lanes is None:
            lanes = range(shape[0]) if axis is not None else range(1)
        elif axis is None or not 0 <= lanes.start <= lanes.stop <= shape[0] or lanes.step != 1:
            raise kccl.InvalidArgument(f"{name} has no lanes {lanes} that can be read")
        given = self.format_of(name)
        *rows_of, columns = shape
        words = given.words_of(columns)
        if axis is None:
            return Stored(given, self._read(name, 0, in_file[0]).reshape(*rows_of, words))
        if self._opened().is_stacked or axis == 0:
            # The rows of a lane along the file's first axis.
            each = in_file[0] // shape[0]
            read = self._read(name, lanes.start * each, lanes.stop * each)
            return Stored(given, read.reshape(len(lanes), *rows_of[1:], words))
        _, rows, _ = shape
        found = np.empty((len(lanes), rows, words), given.word)
        at_once = max(1, _READ // in_file[1])
        for start in range(0, rows, at_once):
            stop = min(start + at_once, rows)
            read = self._read(name, start, stop).reshape(stop - start, shape[0], words)
            found[:, start:stop] = read[:, lanes.start : lanes.stop].transpose(1, 0, 2)
        return Stored(given, found)

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Reads some rows, and converts them to numbers as Format.values() does."""
        return self.read_rows(name, start, stop).values()

    def read_rows(self, name: str, start: int, stop: int) -> Stored:
        """Reads some rows of "embedding" or "head", which are too large to be read at once.

        Returns:
            A tensor [stop - start, hidden] in the format of format_of().

        Raises:
            InvalidArgument: There are no such rows.
            kccl.Error: As read().
        """
        num_rows, columns = self._shape(name) if name in ("embedding", "head") else (0, 0)
        if not 0 <= start <= stop <= num_rows:
            raise kccl.InvalidArgument(f"{name} has no rows {start} to {stop} that can be read")
        # The rows of one entry of the file's first axis. If that axis is the lane, an entry has
        # many rows.
        each = num_rows // self._opened().shapes[self._opened().names[name]][0]
        first, given = start // each, self.format_of(name)
        read = self._read(name, first, -(-stop // each)).reshape(-1, given.words_of(columns))
        return Stored(given, read[start - first * each : stop - first * each])

    def _read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Reads some entries of the file's first axis, in the format of format_of()."""
        source, given = self._opened(), self.format_of(name)
        in_file = source.names[name]
        stored = source.read(in_file, start, stop)
        # NaN, and values that the format cannot hold, are found by the check below.
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = stored.turned_into(given)
        if not given.is_finite(rounded.words):
            told = self._why_not_finite(stored, rounded)
            raise kccl.Error(f"{source.file_of(in_file)}: tensor {in_file} has {told}")
        return rounded.words

    def _why_not_finite(self, stored: Stored, rounded: Stored) -> str:
        """Returns which of a tensor's numbers is not finite, in its file or after rounding."""
        with np.errstate(all="ignore"):
            read = stored.values().astype(np.float32).reshape(-1)
        if not np.isfinite(read).all() or not isinstance(rounded.format, Plain):
            return "a weight that is NaN or infinite"
        value = float(read[~np.isfinite(rounded.to_float32().reshape(-1))][0])
        most, name = rounded.format.most, rounded.format.name
        if name == "float16":
            told = f"{most:g}, the largest of float16: read it with dtype 'bfloat16'"
        else:
            told = f"{most:.3g}, the largest of {name}, and no other dtype holds more"
        return f"a weight beyond {told}; it is {value:.5g}"

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise kccl.InvalidArgument(f"{self.source} has no tensor that is called {name!r} here")
        return self._shapes[name]

    @property
    def notices(self) -> tuple[str, ...]:
        """Returns Source.notices."""
        return self._opened().notices

    def defaults(self) -> Defaults:
        """Returns Source.defaults()."""
        return self._opened().defaults()

    @property
    def has_tokenizer(self) -> bool:
        """Tells whether there is a tokenizer beside the weights. It may be damaged."""
        return self._opened().has_tokenizer

    @property
    def mapped_bytes(self) -> int:
        """Returns the address space in bytes that the largest file takes while a tensor is read."""
        return self._opened().mapped_bytes

    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a text, where the files name them outside their tokenizer."""
        return self._opened().end_ids()

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer beside the weights. It is read once.

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
            know. The text names the file, and the tensor or field.
    """
    path = Path(path)
    if not os.path.exists(path):
        raise kccl.Error(f"{path} does not exist")
    # A pipe is refused: opening one would wait for its writer.
    if not os.path.isdir(path) and not os.path.isfile(path):
        raise kccl.Error(f"{path} is neither a folder nor a file")
    source: Source = FolderSource(path) if os.path.isdir(path) else GgufSource(path)
    try:
        return Checkpoint(source)
    except BaseException:
        source.close()
        raise
