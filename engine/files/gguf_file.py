"""Reads the layout of a GGUF file: metadata, and the place of each tensor.

The numbers of types are those of the package `gguf`. That package's reader is not used, for two
reasons. It trusts the lengths in a file, so a damaged file can fill the memory. And it takes
seconds for an ordinary vocabulary. Here every length is checked against the file's size first.
"""

import math
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.extras import library
from ..base.fields import one_line, shown, unmapped
from ..base.lookalikes import lookalike
from ..formats.base import Stored
from ..formats.table import OF_GGUF

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
# GGUF's number of a type of metadata values -> the type's format character in the module struct.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9
# The greatest depth of arrays within arrays.
_MAX_DEPTH = 8


@dataclass(frozen=True)
class Tensor:
    """A tensor in the file: its shape, outermost axis first, and where its bytes lie. `offset`
    counts from the file's beginning.
    """

    name: str
    quantisation: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _Cursor:
    """Reads values one after the other. Raises kccl.Error at the file's end."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.offset = 0
        self._content = content

    def take(self, num_bytes: int, what: str) -> bytes:
        self.need(num_bytes, what)
        self.offset += num_bytes
        return self._content[self.offset - num_bytes : self.offset]

    def need(self, num_bytes: int, what: str) -> None:
        """Raises kccl.Error if fewer than num_bytes bytes are left. `what` is what needs them."""
        if num_bytes > len(self._content) - self.offset:
            raise kccl.Error(
                f"{self.path} is truncated or damaged: {what} needs {num_bytes} bytes at offset "
                f"{self.offset}, and the file ends at {len(self._content)}"
            )

    def scalar(self, layout: str, what: str) -> Any:
        return struct.unpack(f"<{layout}", self.take(struct.calcsize(f"<{layout}"), what))[0]

    def name(self, what: str) -> str:
        """Returns a string. Raises kccl.Error if it is not UTF-8."""
        try:
            return self._string(what).decode()
        except UnicodeDecodeError as error:
            raise kccl.Error(f"{self.path}: {what} is not UTF-8: {one_line(error)}") from error

    def text(self, what: str) -> str:
        """Returns a string. Bytes that are not UTF-8 become surrogates instead of an error, because
        the engine may not need this value.
        """
        return self._string(what).decode(errors="surrogateescape")

    def _string(self, what: str) -> bytes:
        return self.take(self.scalar("Q", what), what)

    def value(self, kind: int, what: str) -> Any:
        """Returns a value of a type: a number, a string, an array of numbers, a list of strings or
        a list of arrays.
        """
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self.array(what)
        if kind not in _SCALARS:
            raise kccl.Error(f"{self.path}: {what} has type {kind}, which GGUF does not have")
        return self.scalar(_SCALARS[kind], what)

    def array(self, what: str, depth: int = 1) -> Any:
        kind, length = self.scalar("I", what), self.scalar("Q", what)
        # The type of an empty array is not checked, because some programs write a meaningless one.
        if length == 0:
            return [] if kind not in _SCALARS else np.empty(0, _dtype(kind))
        if kind == _STRING:
            self.need(length * struct.calcsize("<Q"), what)
            return [self.text(what) for _ in range(length)]
        if kind == _ARRAY and depth < _MAX_DEPTH:
            self.need(length * struct.calcsize("<IQ"), what)
            return [self.array(what, depth + 1) for _ in range(length)]
        if kind not in _SCALARS:
            raise kccl.Error(
                f"{self.path}: {what} is an array of type {kind}, which GGUF does not have or "
                "which nests too deep"
            )
        return np.frombuffer(self.take(length * _dtype(kind).itemsize, what), _dtype(kind))


def _dtype(kind: int) -> np.dtype[Any]:
    return np.dtype(_SCALARS[kind]).newbyteorder("<")


class GgufFile:
    """An opened GGUF file.

    Attributes:
        path: The file.
        metadata: Values by key: numbers, strings, lists of strings or of arrays, arrays of
            numbers.
        tensors: Tensors by name.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header: the metadata, and where the tensors lie.

        Raises:
            kccl.Error: The file is no GGUF file, or is damaged. The text names the key or tensor.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise kccl.Error(f"cannot read {path}: {error.strerror}") from error
        try:
            self._size = os.fstat(self._fd).st_size
            with mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ) as content:
                self._read_header(_Cursor(path, content))
        # mmap() raises ValueError for an empty file, and OSError for a folder.
        except (OSError, ValueError) as error:
            self.close()
            if isinstance(error, kccl.Error):
                raise
            told = lookalike(path) or f": {one_line(error)}"
            told = f"{path} is no GGUF file{told}"
            raise (unmapped(path, error) or kccl.Error(told)) from error
        except BaseException:
            self.close()
            raise

    def _read_header(self, cursor: _Cursor) -> None:
        if cursor.take(len(_MAGIC), "the magic number") != _MAGIC:
            raise kccl.Error(f"{self.path} is no GGUF file{lookalike(self.path)}")
        version = cursor.scalar("I", "the version")
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise kccl.Error(
                f"{self.path} has version {version} of GGUF: it is big-endian; convert it with "
                f"`gguf-convert-endian {self.path} little`, a command of the package gguf"
            )
        if version not in _VERSIONS:
            raise kccl.Error(
                f"{self.path} has version {version} of GGUF, must have one of {_VERSIONS}"
            )
        num_tensors = cursor.scalar("Q", "the number of tensors")
        num_values = cursor.scalar("Q", "the number of metadata values")
        self.metadata: dict[str, Any] = {}
        # An entry has at least 13 bytes: its key's length (8), its type (4) and a value (1).
        cursor.need(num_values * 13, f"{num_values} metadata values")
        for _ in range(num_values):
            key = cursor.name("a metadata key")
            what = f"key {shown(key)}"
            if key in self.metadata:
                raise kccl.Error(f"{self.path}: {what} is there twice")
            self.metadata[key] = cursor.value(cursor.scalar("I", what), what)
        self._read_tensors(cursor, num_tensors)

    def _read_tensors(self, cursor: _Cursor, num_tensors: int) -> None:
        # A tensor's entry has at least 24 bytes: its name's length (8), number of axes (4), type
        # (4) and offset (8).
        cursor.need(num_tensors * 24, f"{num_tensors} tensors")
        found = [self._read_tensor(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise kccl.Error(
                f"{self.path}: key general.alignment is {alignment!r}, must be a power of two"
            )
        base = -(-cursor.offset // alignment) * alignment
        self.tensors: dict[str, Tensor] = {}
        end = base
        for each in sorted(found, key=lambda each: each.offset):
            if each.name in self.tensors:
                raise kccl.Error(f"{self.path}: tensor {shown(each.name)} is there twice")
            start = base + each.offset
            if start < end or start % alignment:
                raise kccl.Error(
                    f"{self.path} is damaged: tensor {shown(each.name)} begins at offset {start}, "
                    f"inside another or not at a multiple of {alignment}"
                )
            end = start + each.num_bytes
            if end > self._size:
                raise kccl.Error(
                    f"{self.path} is truncated or damaged: tensor {shown(each.name)} ends at byte "
                    f"{end}, and the file at {self._size}"
                )
            self.tensors[each.name] = Tensor(
                each.name, each.quantisation, each.shape, start, each.num_bytes
            )

    def _read_tensor(self, cursor: _Cursor) -> Tensor:
        name = cursor.name("a tensor's name")
        what = f"tensor {shown(name)}"
        num_dimensions = cursor.scalar("I", what)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise kccl.Error(f"{self.path}: {what} has {num_dimensions} axes, must have 1 to 4")
        shape = tuple(cursor.scalar("Q", what) for _ in range(num_dimensions))[::-1]
        code, offset = cursor.scalar("I", what), cursor.scalar("Q", what)
        constants = library("gguf.constants")
        try:
            quantisation = constants.GGMLQuantizationType(code)
        except ValueError:
            raise kccl.Error(f"{self.path}: {what} has the unknown quantisation {code}") from None
        if quantisation.name not in OF_GGUF:
            raise kccl.Error(
                f"{self.path}: {what} has quantisation {quantisation.name}, must be one of "
                f"{', '.join(OF_GGUF)}"
            )
        stored_in = OF_GGUF[quantisation.name]
        block = stored_in.block
        if shape[-1] % block or not all(shape):
            raise kccl.Error(
                f"{self.path}: {what} has shape {list(shape)}, whose last axis must be a positive "
                f"multiple of {block} for {quantisation.name}"
            )
        num_bytes = stored_in.bytes_of(math.prod(shape))
        return Tensor(name, quantisation.name, shape, offset, num_bytes)

    def read(self, name: str, start: int, stop: int) -> Stored:
        """Reads the entries from start to stop - 1 of a tensor's first axis. Returns them in their
        stored format, in new memory.

        Raises:
            kccl.Error: The file cannot be read.
        """
        tensor = self.tensors[name]
        each_bytes = tensor.num_bytes // tensor.shape[0]
        offset, num_bytes = tensor.offset + start * each_bytes, (stop - start) * each_bytes
        stored_in = OF_GGUF[tensor.quantisation]
        words = self._bytes(tensor, offset, num_bytes).view(stored_in.word)
        rows = (stop - start, *tensor.shape[1:-1]) if len(tensor.shape) > 1 else ()
        return Stored(stored_in, words.reshape(*rows, -1))

    def read_rows(self, name: str, start: int, stop: int) -> Stored:
        """Reads the rows from start to stop - 1 of a tensor. All axes but the last are counted as
        one axis of rows. Returns the rows in their stored format, in new memory.

        Raises:
            kccl.Error: The file cannot be read.
        """
        tensor = self.tensors[name]
        row_bytes = tensor.num_bytes // math.prod(tensor.shape[:-1])
        stored_in, num_bytes = OF_GGUF[tensor.quantisation], (stop - start) * row_bytes
        words = self._bytes(tensor, tensor.offset + start * row_bytes, num_bytes)
        return Stored(stored_in, words.view(stored_in.word).reshape(stop - start, -1))

    def _bytes(self, tensor: Tensor, offset: int, num_bytes: int) -> NDArray[np.uint8]:
        raw = np.empty(num_bytes, np.uint8)
        view, done = raw.data, 0
        while done < num_bytes:
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise kccl.Error(
                    f"{self.path}: cannot read tensor {tensor.name}: {error.strerror}"
                ) from error
            if count == 0:
                raise kccl.Error(f"{self.path}: tensor {tensor.name} was cut off since it opened")
            done += count
        return raw

    def close(self) -> None:
        """Closes the file. May be called again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
