"""Opens a model on disk: its configuration, its tensors under one set of names, its tokenizer.

Opening reads the headers, and the small tensors that say how a matrix is stored. It checks every
shape by the configuration. Other tensors are read when a caller asks for them, and are not kept.
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
from .kept import expanded, holds, kept_formats, op_of, shown_format
from .rounded import is_rounded, rounded_formats, what_is_rounded
from .source import CUT_AXIS, Made, Source

# read() reads about this many elements at a time if it needs only some columns of a matrix, because
# it must read whole rows.
_READ = 1 << 18


class Checkpoint(Closing):
    """An opened model. It is a context manager.

    Attributes:
        config: The model's configuration.
        source: Its folder or file, for messages.
        files: The files with its weights: Source.files.
        stored: How the file stores the matrices: one or several of "BF16", "F16",
            "F32", GGUF's names, and those of quantised folders' forms, as in "INT4".
        dtype: The type to which matrices are converted: "bfloat16" or "float16".
        formats: The formats in which matrices are given. A key is the name of a matrix, of an op,
            or of a kind of op in ops.KINDS; the first of these that exists counts. The format is
            that of `dtype`, unless as_stored() keeps the file's or as_weights() rounds to another.
        weights: The argument of as_weights(). "" if it was not called.
    """

    def __init__(self, source: Source) -> None:
        """Checks all names and shapes. If all matrices are stored as F16, `dtype` is "float16",
        otherwise "bfloat16".

        Raises:
            kccl.Error: A tensor is missing, has another shape than the configuration says, or is
                not part of the model.
        """
        self.config = source.config
        self.source, self.files = source.path, source.files
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
        """Returns a checkpoint of the same files that converts weights to `dtype`, rounding to the
        nearest. Weights that a GGUF file holds quantised are first rounded to BF16.

        Raises:
            InvalidArgument: `dtype` is neither "bfloat16" nor "float16".
        """
        if dtype not in DTYPES:
            names = ", ".join(map(repr, DTYPES))
            raise kccl.InvalidArgument(f"dtype is {dtype!r}, must be one of {names}")
        other = copy.copy(self)
        other.dtype, other._keeps, other.weights = dtype, (), ""
        other.formats = other._formats_of(self._stored, ())
        return other

    def as_stored(
        self, multiplied: Collection[str] = MULTIPLIED, *, is_alike: bool = False
    ) -> "Checkpoint":
        """Returns a checkpoint of the same files that keeps the stored format of an op's matrices,
        if they have one format, it is among `multiplied`, and lanes have whole blocks. It converts
        other matrices to `dtype`. A kind of op may have several formats only if they are formats of
        blocks, which may differ between layers, and within wq, wk and wv. With `is_alike`, matrices
        of GGUF's blocks get the smallest form that holds the numbers of all.

        Args:
            multiplied: The names of the formats that the executor can multiply.
            is_alike: Whether each kind of op must have one format, as the monokernel needs.
        """
        other = copy.copy(self)
        other._keeps, other.weights = multiplied, ""
        other.formats = other._formats_of(self._stored, multiplied, is_alike=is_alike)
        return other

    def as_weights(self, weights: str) -> "Checkpoint":
        """Returns a checkpoint of the same files that rounds the layers' matrices to fewer bits. A
        group of columns has a scale, which maps its largest number to the format's largest, and
        weights are rounded to the nearest. A group has 128 columns, or fewer if a lane has no whole
        ones. MXFP4 is rounded by its specification. Embedding and head stay in `dtype`.

        Args:
            weights: "fp8", "int8", "int4" or "mxfp4".

        Raises:
            InvalidArgument: There is no such format, the file is quantised already, or no matrix's
                lanes have whole groups.
        """
        rounded = rounded_formats(weights, self._stored, self._shapes, str(self.source))
        other = copy.copy(self)
        other._keeps, other.weights = (), weights
        other.formats = other._formats_of(rounded, ON_HOST)
        return other

    def with_formats(self, formats: Mapping[str, Format]) -> "Checkpoint":
        """Returns a checkpoint of the same files with another one's `formats`."""
        other = copy.copy(self)
        other.formats = dict(formats)
        return other

    @property
    def rounded(self) -> tuple[str, ...]:
        """Returns the stored formats, named as in `stored`, of matrices given in another one."""
        found = {
            shown_format(each)
            for name, each in self._stored.items()
            if not holds(self.format_of(name), each)
            and not (self.weights and is_rounded(self.format_of(name), each))
        }
        return tuple(sorted(found))

    @property
    def fewer_bits(self) -> tuple[str, ...]:
        """Returns sentences that say which matrices as_weights() rounds and which it does not."""
        if not self.weights:
            return ()
        in_file = [self._opened().names[name] for name in self._stored]
        given = {name: self.format_of(name) for name in self._stored}
        return what_is_rounded(self.weights, self._stored, given, self._shapes, in_file)

    @property
    def expanded(self) -> tuple[str, ...]:
        """Returns sentences that say which formats of blocks as_stored() does not keep, but expands
        to other blocks, or converts to `dtype`, and why. Returns none if it keeps no formats.
        """
        given = {name: self.format_of(name) for name in self._stored}
        source = self._opened()
        names = {name: source.main_of(source.names[name]) for name in self._stored}
        return expanded(self._stored, given, self._shapes, names, self._keeps)

    def _formats_of(
        self, stored: Mapping[str, Format], keeps: Collection[str], *, is_alike: bool = False
    ) -> dict[str, Format]:
        found = kept_formats(stored, self._shapes, DTYPES[self.dtype], keeps, is_alike=is_alike)
        if self.config.is_tied:  # The head is the embedding's tensor.
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
        """Reads a tensor, or some lanes of it, and converts its words to numbers by
        Format.values().
        """
        return self.read(name, lanes).values()

    def read(self, name: str, lanes: range | None = None) -> Stored:
        """Reads a tensor, or some lanes of it.

        Args:
            name: One of names().
            lanes: The lanes to read of a matrix that is cut into lanes. None means the whole
                tensor.

        Returns:
            A tensor of the shape of config.shapes(), with only the lanes that were read. The file's
            numbers are rounded to the format of format_of().

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
            # How many entries of the file's first axis a lane has.
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

    def drawn(self, name: str) -> Made | None:
        """Returns how a device makes a matrix's words (Source.drawn()), or None."""
        source = self._opened()
        return None if self.weights or is_vector(name) else source.drawn(source.names[name])

    def rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Does what read_rows() does, and converts the rows to numbers by Format.values()."""
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
        # How many rows an entry of the file's first axis has: 1, or more if that axis is the lanes.
        each = num_rows // self._opened().shapes[self._opened().names[name]][0]
        first, given = start // each, self.format_of(name)
        read = self._read(name, first, -(-stop // each)).reshape(-1, given.words_of(columns))
        return Stored(given, read[start - first * each : stop - first * each])

    def _read(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Reads some entries of the file's first axis, in the format of format_of()."""
        source, given = self._opened(), self.format_of(name)
        in_file = source.names[name]
        stored = source.read(in_file, start, stop)
        # NumPy's warnings are off: is_finite() below finds NaN and values that do not fit.
        with np.errstate(invalid="ignore", over="ignore"):
            rounded = stored.turned_into(given)
        if not given.is_finite(rounded.words):
            told = self._why_not_finite(stored, rounded)
            raise kccl.Error(f"{source.file_of(in_file)}: tensor {in_file} has {told}")
        return rounded.words

    def _why_not_finite(self, stored: Stored, rounded: Stored) -> str:
        """Returns words for an error: which number is not finite, in the file or after rounding."""
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
        """Returns the bytes of the largest file that is mapped while a tensor is read."""
        return self._opened().mapped_bytes

    def end_ids(self) -> tuple[int, ...]:
        """Returns the ids that end a text according to other files than the tokenizer's."""
        return self._opened().end_ids()

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer beside the weights. It is read once.

        Raises:
            kccl.Error: There is none, it cannot be read, or it can give ids that the embedding does
                not have.
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
        kccl.Error: The model cannot be read, is damaged, or is one that the engine does not know.
            The text names the file, and the tensor or field.
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
