"""Quantises a folder with weights of 16 or 32 bits: writes a new folder whose layers have 8 or 4
bits a weight. The layout is that of compressed-tensors, which transformers and vLLM also read.

A group of a row's columns has an FP32 scale; in FP8 a whole row has one. The scale maps the group's
largest number to the format's largest, and each weight is rounded to the nearest.
"""

import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.extras import library
from ..base.fields import read_json, shown
from ..formats.base import Plain
from ..formats.e4m3 import E4m3
from ..formats.groups import Groups
from ..formats.int4 import ZERO, Int4
from ..formats.int8 import Int8
from ..formats.mxfp4 import MXFP4
from ..formats.table import IN_FILES
from ..model.config import is_vector
from .checkpoint import open_checkpoint
from .hf import FolderSource
from .hf_files import INDEX
from .schemes import SMALLEST_GROUP

Tensors = dict[str, NDArray[Any]]

# The sizes of a group in columns. A matrix gets the first size that divides its number of columns.
_GROUPS = (128, 64, 32)
# How many rows are rounded at a time.
_AT_ONCE = 1024
# Patterns of the other files of a model, which are copied.
_BESIDE = (
    *("generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab*", "merges.txt", "chat_template*", "LICENSE*"),
)


@dataclass(frozen=True)
class _Kind:
    """One of KINDS: how matrices are rounded and written.

    Attributes:
        form: compressed-tensors' name of the layout.
        bits: The bits of a number.
        sizes: The sizes of a group in columns: the first that divides a row. (): a row is one
            group.
        groups: Makes the format, given a group's number of columns. None: the format is MXFP4.
        zero: The number that is added to integers before they are packed into words of 32 bits, so
            that none is negative. 0 if the format's numbers are floats.
    """

    form: str
    bits: int
    sizes: tuple[int, ...] = ()
    groups: Callable[[int], Groups] | None = None
    zero: int = 0

    def columns_of(self, columns: int) -> int:
        """Returns the group's size for rows of `columns` columns. Returns 0 if no size divides
        them.
        """
        if not self.sizes:
            return columns if columns % SMALLEST_GROUP == 0 else 0
        return next((each for each in self.sizes if columns % each == 0), 0)

    def described(self, columns: int) -> dict[str, Any]:
        """Returns config.json's description of matrices with groups of `columns` columns."""
        strategy: dict[str, Any] = {"strategy": "channel"}
        if self.sizes:
            strategy = {"strategy": "group", "group_size": columns}
        kind = "int" if self.zero else "float"
        return {"num_bits": self.bits, "type": kind, "symmetric": True, "dynamic": False} | strategy


KINDS = {
    "fp8": _Kind("float-quantized", 8, groups=E4m3),
    "int8": _Kind("pack-quantized", 8, _GROUPS, partial(Int8, has_zeros=False), 128),
    "int4": _Kind("pack-quantized", 4, _GROUPS, partial(Int4, has_zeros=False), ZERO),
    "mxfp4": _Kind("mxfp4-pack-quantized", 4, (MXFP4.block,)),
}
"""The values of Engine's argument `weights` -> how matrices are written."""


def write_quantized(
    model: Path, out: Path, weights: str, progress: Callable[[int, int], None] | None = None
) -> tuple[int, int]:
    """Writes a quantised folder. `out` appears only when it is complete.

    Args:
        model: A folder in Hugging Face's layout with weights of 16 or 32 bits.
        out: The new folder, which must not exist.
        weights: One of KINDS.
        progress: Called with (bytes read so far, all bytes).

    Returns:
        The bytes of the weights before and afterwards.

    Raises:
        InvalidArgument: `weights` is none of KINDS, `out` exists, or the model cannot be quantised.
        kccl.Error: A file cannot be read or written, or a weight is NaN or infinite.
    """
    if not isinstance(weights, str) or weights not in KINDS:
        raise kccl.InvalidArgument(
            f"weights is {weights!r}, must be one of {', '.join(map(repr, KINDS))}"
        )
    if not model.is_dir():
        raise kccl.InvalidArgument(f"{model} is no folder: only folders are quantised")
    # Unlike Path.exists(), lexists() does not raise for a name that is too long.
    if os.path.lexists(out):
        raise kccl.InvalidArgument(f"{out} exists already: name a new folder")
    # Opening the model raises if tensors are missing, superfluous or of a wrong shape.
    open_checkpoint(model).close()
    with closing(FolderSource(model)) as source:
        grids = _grids_of(source, KINDS[weights])
        try:
            aside = tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent)
        except OSError as error:
            raise kccl.Error(f"cannot write {out}: {error.strerror or error}") from error
        try:
            made = Path(aside, "made")
            made.mkdir()
            sizes = _write(source, made, KINDS[weights], grids, progress)
            made.rename(out)
        except (OSError, library("safetensors").SafetensorError) as error:
            told = getattr(error, "strerror", None) or error
            raise kccl.Error(f"cannot write {out}: {told}") from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return sizes


def _grids_of(source: FolderSource, kind: _Kind) -> dict[str, int]:
    """Returns the group's size for each matrix of a layer, by its name in the folder. 0 means that
    the matrix is copied.
    """
    if source.is_stacked:
        raise kccl.InvalidArgument(
            f"{source.path} has a Laneformer, which compressed-tensors has no layout for: "
            "Engine(weights=) and --weights round it while it is read"
        )
    held = {name: source.dtypes[name] for name in source.names.values()}
    packed = sorted(name for name, each in held.items() if not isinstance(IN_FILES[each], Plain))
    if packed:
        raise kccl.InvalidArgument(f"{source.path} is quantised already, as in {shown(packed[0])}")
    found = {
        name: kind.columns_of(source.shapes[name][1])
        for own, name in source.names.items()
        if own.startswith("layers.") and not is_vector(own)
    }
    if not any(found.values()):
        raise kccl.InvalidArgument(
            f"{source.path} has no matrix whose rows are whole groups of {_GROUPS[-1]} columns"
        )
    return found


def _write(
    source: FolderSource,
    folder: Path,
    kind: _Kind,
    grids: Mapping[str, int],
    progress: Callable[[int, int], None] | None,
) -> tuple[int, int]:
    safetensors = library("safetensors.numpy")
    files, config = _files_of(source), read_json(source.path / "config.json")
    before, after, total = 0, 0, sum(_bytes_of(source, name) for name in source.names.values())
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors: Tensors = {}
        for name in names:
            columns = grids.get(name, 0)
            tensors |= _quantised(source, name, kind, columns) if columns else _copied(source, name)
            before += _bytes_of(source, name)
            if progress is not None:
                progress(before, total)
        safetensors.save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        after += sum(each.nbytes for each in tensors.values())
    index = {"metadata": {"total_size": after}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    config["quantization_config"] = _description(source, kind, grids)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for pattern in _BESIDE:
        for each in source.path.glob(pattern):
            if each.is_file():
                shutil.copyfile(each, folder / each.name)
    return before, after


def _files_of(source: FolderSource) -> list[list[str]]:
    """Returns the tensors' names for each new file. Each layer has a file, and the tensors outside
    the layers share one.
    """
    files: dict[str, list[str]] = {}
    for own, name in source.names.items():
        layer = own.split(".")[1] if own.startswith("layers.") else ""
        files.setdefault(layer, []).append(name)
    return [*files.values()]


def _bytes_of(source: FolderSource, name: str) -> int:
    form = IN_FILES[source.dtypes[name]]
    return math.prod(source.shapes[name]) * int(np.dtype(form.word).itemsize)


def _copied(source: FolderSource, name: str) -> Tensors:
    values = np.ascontiguousarray(source.read(name, 0, source.shapes[name][0]).values())
    _check_finite(source, name, values)
    return {name: values}


def _check_finite(source: FolderSource, name: str, values: NDArray[Any]) -> None:
    if not np.isfinite(values).all():
        raise kccl.Error(
            f"{source.file_of(name)}: tensor {shown(name)} has a weight that is NaN or infinite"
        )


def _quantised(source: FolderSource, name: str, kind: _Kind, columns: int) -> Tensors:
    """Quantises a matrix. Returns the tensors to write: its numbers, scales, and for integers its
    shape.
    """
    rows = source.shapes[name]
    parts = [*_parts(source, name, kind, columns)]
    numbers, scales = (np.concatenate(each) for each in zip(*parts, strict=True))
    layer = name.removesuffix(".weight")
    if kind.bits == 8 and not kind.zero:
        return {name: numbers.view(ml_dtypes.float8_e4m3fn), f"{layer}.weight_scale": scales}
    tensors = {f"{layer}.weight_packed": numbers, f"{layer}.weight_scale": scales}
    return tensors | ({f"{layer}.weight_shape": np.array(rows, np.int64)} if kind.zero else {})


def _parts(
    source: FolderSource, name: str, kind: _Kind, columns: int
) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
    """Yields (numbers, scales) of _AT_ONCE rows at a time."""
    rows, row_columns = source.shapes[name]
    for start in range(0, rows, _AT_ONCE):
        values = source.read(name, start, min(start + _AT_ONCE, rows)).to_float32()
        _check_finite(source, name, values)
        if kind.groups is None:
            yield MXFP4.to_pairs(values)
            continue
        form = kind.groups(columns)
        weights, scales, _ = form.quantised(values.reshape(-1, columns))
        scales = scales.reshape(len(values), -1)
        if not kind.zero:
            yield weights.reshape(len(values), row_columns), scales
        else:
            integers = form.numbers(weights).astype(np.int32).reshape(len(values), row_columns)
            yield _packed(integers + kind.zero, kind.bits), scales


def _packed(integers: NDArray[np.int32], bits: int) -> NDArray[np.int32]:
    """Packs integers into words of 32 bits. The first integer is in a word's lowest bits."""
    in_word = 32 // bits
    places = integers.reshape(len(integers), -1, in_word).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    words: NDArray[np.uint32] = np.bitwise_or.reduce(places << shifts, axis=2)
    return words.view(np.int32)


def _description(source: FolderSource, kind: _Kind, grids: Mapping[str, int]) -> dict[str, Any]:
    """Returns config.json's `quantization_config`."""
    modules = {_module_of(name): columns for name, columns in grids.items()}
    # In FP8 a group is a row, whatever its length, so all matrices have the same description.
    sizes = Counter(columns if kind.sizes else 0 for columns in modules.values() if columns)
    (usual, _), *others = sizes.most_common()
    targets = {usual: ["Linear"]} | {
        columns: [module for module, each in modules.items() if each == columns]
        for columns, _ in others
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind.form,
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {
                "targets": names,
                "weights": kind.described(columns),
                "input_activations": None,
                "output_activations": None,
            }
            for number, (columns, names) in enumerate(targets.items())
        },
        "ignore": ["lm_head", *(module for module, columns in modules.items() if not columns)],
    }


def _module_of(name: str) -> str:
    """Returns a module's name in transformers. Adds "model.", which files without a head lack."""
    module = name.removesuffix(".weight")
    return module if module.startswith("model.") else f"model.{module}"
