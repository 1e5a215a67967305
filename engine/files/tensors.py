"""Reads the tensors of a folder in Hugging Face's layout, by the folder's names."""

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.fields import shown
from ..formats.base import Plain
from ..formats.table import IN_FILES
from .hf_files import E4M3, E8M0, Held, read_bytes, starts_of, wrong_dtype

# Dtype in safetensors files -> NumPy's dtype. The files are little-endian.
_DTYPES: dict[str, Any] = {E4M3: "u1", E8M0: "u1", "U8": "u1", "I8": "i1", "I32": "<i4"}
_DTYPES |= {"I64": "<i8"}
_DTYPES |= {name: each.dtype for name, each in IN_FILES.items() if isinstance(each, Plain)}


class Tensors:
    """The tensors of a folder.

    Attributes:
        path: The folder.
        files: The file of each tensor.
        held: Dtype and shape of each tensor.
    """

    def __init__(self, path: Path, files: Mapping[str, Path], held: Held) -> None:
        self.path, self.files, self.held = path, files, held
        self._last = threading.local()
        # File -> tensor -> its first byte. Read when a file's first tensor is read.
        self._starts: dict[Path, dict[str, int]] = {}

    def read(self, name: str, rows: slice = slice(None)) -> NDArray[Any]:
        """Reads a tensor, or a part of its first axis.

        Returns:
            The numbers in NumPy's dtype or one of ml_dtypes. 8-bit floats are uint8.

        Raises:
            kccl.Error: The file cannot be read.
        """
        file, (dtype, shape) = self.files[name], self.held[name]
        if file not in self._starts:
            # Reads the header once for each file. safetensors would read it for each tensor.
            self._starts[file] = starts_of(file)
        stored_in = np.dtype(_DTYPES[dtype])
        row_bytes = math.prod(shape[1:]) * stored_in.itemsize
        first, end, _ = rows.indices(math.prod(shape[:1]))
        start = self._starts[file][name] + first * row_bytes
        read = read_bytes(file, name, start, (end - first) * row_bytes).view(stored_in)
        found: NDArray[Any] = read.reshape((end - first, *shape[1:]) if shape else ())
        return found

    def read_rows(self, name: str, rows: slice) -> NDArray[np.uint8]:
        """Reads a part of the first two axes of a tensor of bytes, which count as one."""
        file, (_, (most, each, *rest)) = self.files[name], self.held[name]
        if file not in self._starts:
            self._starts[file] = starts_of(file)
        row_bytes = math.prod(rest)
        first, end, _ = rows.indices(most * each)
        start = self._starts[file][name] + first * row_bytes
        return read_bytes(file, name, start, (end - first) * row_bytes)

    def kept(self, name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Returns what make() returns for this name. If the last call had the same name, returns
        that call's result instead of calling make(). Each thread keeps a result of its own, because
        threads, which may be ranks, read different tensors.
        """
        kept = getattr(self._last, "made", None)
        if kept is None or kept[0] != name:
            # Frees the old array before the new one is made.
            self._last.made = kept = None
            self._last.made = kept = name, make()
        return kept[1]

    def forget(self) -> None:
        """Frees what kept() holds for all threads."""
        self._last = threading.local()

    def check(self, name: str, dtypes: Sequence[str], *shapes: tuple[int, ...]) -> None:
        """Checks that a tensor is there, and that it has one of the dtypes and shapes.

        Raises:
            kccl.Error: The tensor is missing, or has another dtype or shape. The text names it.
        """
        if name not in self.held:
            raise kccl.Error(f"{self.path}: tensor {shown(name)} is missing")
        dtype, shape = self.held[name]
        if dtype not in dtypes:
            raise wrong_dtype(self.files[name], name, dtype, dtypes)
        if shape not in shapes:
            wanted = " or ".join(str(list(each)) for each in shapes)
            raise self.wrong(name, f"shape {list(shape)}, must have {wanted}")

    def wrong(self, name: str, told: str) -> kccl.Error:
        """Returns an error that names a tensor and its file, and says what is wrong with it."""
        return kccl.Error(f"{self.files[name]}: tensor {shown(name)} has {told}")
