"""Finds and reads a folder's files of weights. Chooses the same files as transformers."""

import json
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kccl

from ..base.extras import library
from ..base.fields import one_line, read_json, shown, unmapped
from ..base.lookalikes import lookalike
from ..formats.base import Plain
from ..formats.table import IN_FILES

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = sorted(name for name, stored in IN_FILES.items() if isinstance(stored, Plain))
"""The dtypes of matrices that are not quantised, and of vectors."""
E4M3, E8M0 = "F8_E4M3", "F8_E8M0"
"""The dtypes of FP8 e4m3fn, and of scales that are powers of two. Both are read as bytes."""
# The most bytes of a safetensors file's header. The format allows no more.
_MAX_HEADER = 100_000_000
# Files of adapters (LoRA). If `peft` is installed, transformers adds their weights to the model's;
# the engine does not.
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
# Patterns of files of weights in formats that the engine does not read, the likeliest first.
_OTHER_FORMATS = ("pytorch_model*.bin*", "*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.npz")

Held = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor in a file."""


def check_folder(folder: Path) -> None:
    """Checks whether a folder without config.json holds a model in another form.

    Raises:
        kccl.Error: The folder holds a model in another form. The text says what to name as the
        model instead.
    """
    if (folder / "config.json").exists():
        return
    if files := _names(folder, "*.gguf"):
        raise kccl.Error(f"{folder} has {files[0]} and no config.json: give that file as the model")
    if snapshots := sorted(folder.glob("snapshots/*")):
        raise kccl.Error(
            f"{folder} has snapshots of a model: give one as the model, {snapshots[0]}"
        )


def check_adapter(folder: Path) -> None:
    """Checks that a folder has no adapter.

    Raises:
        kccl.Error: There is an adapter. The text names its file and the base model.
    """
    for name in _ADAPTERS:
        if not (folder / name).exists():
            continue
        base = ""
        if name == _ADAPTERS[0]:
            named = read_json(folder / name).get("base_model_name_or_path")
            base = f" of {shown(named)}" if isinstance(named, str) and named else ""
        raise kccl.Error(
            f"{folder / name}: the folder has an adapter{base}, which changes the weights and "
            "which the engine does not apply: merge it into its base (peft: merge_and_unload()), "
            "or remove it"
        )


def read_headers(folder: Path, more: Collection[str] = ()) -> tuple[dict[str, Path], Held]:
    """Returns the file of each tensor, and the tensors' shapes and dtypes.

    Args:
        more: Dtypes that tensors may have besides DTYPES.

    Raises:
        kccl.Error: A file is missing, damaged or of another format.
    """
    file, index = folder / WEIGHTS, folder / INDEX
    # As in transformers: if there is a single file, an index beside it is ignored.
    if file.exists() or file.is_symlink():
        tensors = _known(file, _headers(file), more)
        return dict.fromkeys(tensors, file), tensors
    if index.exists():
        return _sharded(folder, index, more)
    raise kccl.Error(_no_weights(folder))


def _no_weights(folder: Path) -> str:
    """Returns an error's text for a folder without weights: what it has instead, and what to do."""
    missing = f"{folder} has neither {WEIGHTS} nor {INDEX}"
    others = _names(folder, "*.safetensors")
    if parts := _names(folder, "model-*-of-*.safetensors"):
        return f"{missing}; {parts[0]} is a part of a model, whose index is missing"
    variants = [name for name in others if name.startswith("model.")]
    if variants:
        return f"{missing}; {variants[0]} is a variant: to use it, name it {WEIGHTS}"
    if "consolidated.safetensors" in others:
        return (
            f"{missing}; consolidated.safetensors has Mistral's own names for tensors, which are "
            "not read: take the model's files for transformers"
        )
    if others:
        return f"{missing}; {others[0]} is not a name that transformers reads: name it {WEIGHTS}"
    if gguf := _names(folder, "*.gguf"):
        return f"{missing}; it has {gguf[0]}: give that file as the model"
    found = [name for pattern in _OTHER_FORMATS for name in _names(folder, pattern)]
    if found:
        return (
            f"{missing}; {found[0]} is of a format that is not read: load the folder with "
            "transformers, and save it with save_pretrained()"
        )
    return missing


def _names(folder: Path, pattern: str) -> list[str]:
    return sorted(each.name for each in folder.glob(pattern))


def _sharded(folder: Path, index: Path, more: Collection[str]) -> tuple[dict[str, Path], Held]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise kccl.Error(f"{index}: field weight_map is missing or names no tensor")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise kccl.Error(
                f"{index}: tensor {shown(name)} is in {shown(str(file))}, "
                "must be in a file beside it"
            )
    tensors: Held = {}
    for file in sorted(set(weight_map.values())):
        held = _headers(folder / file)
        for name in sorted(held):
            if weight_map.get(name) != file:
                raise kccl.Error(
                    f"{folder / file}: tensor {shown(name)} is here, but not by {INDEX}"
                )
        for name in sorted(name for name in weight_map if weight_map[name] == file):
            if name not in held:
                raise kccl.Error(f"{folder / file}: tensor {shown(name)} is missing")
        tensors |= _known(folder / file, held, more)
    return {name: folder / file for name, file in weight_map.items()}, tensors


def _known(file: Path, held: Held, more: Collection[str]) -> Held:
    """Returns a file's tensors. Raises kccl.Error if one has a dtype that cannot be read."""
    for name, (dtype, _) in held.items():
        if dtype not in DTYPES and dtype not in more:
            raise wrong_dtype(file, name, dtype, (*DTYPES, *more))
    return held


def wrong_dtype(file: Path, name: str, dtype: str, wanted: Sequence[str]) -> kccl.Error:
    """Returns the error for a tensor whose dtype is not among those `wanted`."""
    one_of = "one of " if len(wanted) > 1 else ""
    return kccl.Error(
        f"{file}: tensor {shown(name)} has dtype {dtype}, must be {one_of}{', '.join(wanted)}"
    )


def read_bytes(file: Path, name: str, start: int, num: int) -> NDArray[np.uint8]:
    """Reads some bytes of a tensor.

    Args:
        file: The tensor's file.
        start, num: The first byte in the file, and the number of bytes.

    Raises:
        kccl.Error: The file cannot be read.
    """
    try:
        with open(file, "rb") as opened:
            opened.seek(start)
            read = np.fromfile(opened, np.uint8, num)
    except (MemoryError, OSError) as error:
        raise _unread(file, name, error) from error
    if read.size != num:
        raise kccl.Error(f"{file}: cannot read tensor {shown(name)}: the file ends before it")
    return read


def starts_of(file: Path) -> dict[str, int]:
    """Returns at which byte of a file each tensor begins. read_headers() must have read the file's
    header before.

    Raises:
        kccl.Error: The file cannot be read.
    """
    try:
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
            # The entry __metadata__ describes the file, and is no tensor.
            header.pop("__metadata__", None)
            found = {name: each["data_offsets"] for name, each in header.items()}
            return {name: 8 + length + start for name, (start, _) in found.items()}
    # The file may have been replaced since read_headers() checked its header.
    except (
        *(MemoryError, OSError, ValueError, TypeError, KeyError, AttributeError, struct.error),
    ) as error:
        raise kccl.Error(f"cannot read {file}: {one_line(error)}") from error


def _unread(file: Path, name: str, error: Exception) -> kccl.Error:
    told = f"{file}: cannot read tensor {shown(name)}: {one_line(error)}"
    return unmapped(file, error) or kccl.Error(told)


def _headers(file: Path) -> Held:
    safetensors = library("safetensors")
    if file.is_symlink() and not file.exists():
        raise kccl.Error(
            f"{file} is a link to a file that does not exist: run `hf download` for its model"
        )
    if not file.is_file():
        raise kccl.Error(f"{file} does not exist")
    try:
        with safetensors.safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()
            }
    except (MemoryError, OSError) as error:
        told = f"cannot read {file}: {one_line(error)}"
        raise (unmapped(file, error) or kccl.Error(told)) from error
    except (safetensors.SafetensorError, ValueError) as error:
        told = lookalike(file) or _truncated(file) or f": {one_line(error)}"
        raise kccl.Error(f"{file} is no safetensors file{told}") from error


def _truncated(file: Path) -> str:
    """Returns ": it is truncated; ..." if the file ends before its header or its tensors do, else
    "".
    """
    try:
        size = file.stat().st_size
        with open(file, "rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > size - 8:
                is_header = length <= _MAX_HEADER
                return f": it is truncated; its header has {length} bytes" if is_header else ""
            header = json.loads(opened.read(length))
        ends = [each["data_offsets"][1] for each in header.values() if "data_offsets" in each]
        needed = 8 + length + max(ends, default=0)
    # A damaged header may raise any of these. Then the caller shows the message of safetensors.
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error):
        return ""
    if needed <= size:
        return ""
    return f": it is truncated; its tensors end at byte {needed}, and the file at {size}"
