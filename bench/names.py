"""Translates the names that people write for collectives and element types."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

import kccl

from .collectives import NAMES

_COLLECTIVES = {name.replace("_", ""): name for name in NAMES} | {
    "bcast": "broadcast",
    "reducescatterblock": "reduce_scatter",
}
_DTYPES = {dtype.name: dtype.name for dtype in kccl.dtypes.ALL} | {
    **dict.fromkeys(("fp32", "f32", "float", "single"), "float32"),
    **dict.fromkeys(("fp64", "f64", "double"), "float64"),
    **dict.fromkeys(("fp16", "f16", "half"), "float16"),
    "bf16": "bfloat16",
    **dict.fromkeys(("i32", "int"), "int32"),
    **dict.fromkeys(("i64", "long"), "int64"),
    **dict.fromkeys(("i8", "char"), "int8"),
    **dict.fromkeys(("i16", "short"), "int16"),
    **dict.fromkeys(("u8", "byte"), "uint8"),
    "u16": "uint16",
    "u32": "uint32",
    "u64": "uint64",
    **dict.fromkeys(("fp8", "fp8_e4m3", "float8_e4m3"), "float8_e4m3fn"),
    "fp8_e5m2": "float8_e5m2",
    **dict.fromkeys(("c64", "cfloat"), "complex64"),
    **dict.fromkeys(("c128", "cdouble"), "complex128"),
}


def collective_name(text: str, among: Iterable[str] = NAMES) -> str:
    """Returns a collective's name, from however people write it: "allreduce", "all-reduce",
    "bcast".

    Args:
        text: The name that was given.
        among: The names of the collectives that are allowed.

    Raises:
        argparse.ArgumentTypeError: No allowed collective has that name.
    """
    known = {*among}
    squeezed = text.lower().replace("-", "").replace("_", "")
    if squeezed == "decode":
        raise argparse.ArgumentTypeError("decode stands first: kccl bench decode [options]")
    names = {key: name for key, name in _COLLECTIVES.items() if name in known}
    return _meant("collective", text, squeezed, names)


def dtype_name(text: str) -> str:
    """Returns an element type's name, from however people write it: "fp32", "bf16", "half".

    Raises:
        argparse.ArgumentTypeError: No element type has that name.
    """
    return _meant("element type", text, text.lower(), _DTYPES)


def did_you_mean(text: str, known: Iterable[str]) -> str:
    """Returns ". Did you mean X?" to append to an error; "" if no known name is similar."""
    close = get_close_matches(text.lower(), list(known), n=1)
    return f". Did you mean {close[0]}?" if close else ""


def _meant(kind: str, text: str, key: str, names: Mapping[str, str]) -> str:
    if key in names:
        return names[key]
    close = get_close_matches(key, list(names), n=1)
    question = f". Did you mean {names[close[0]]}?" if close else ""
    known = ", ".join(dict.fromkeys(names.values()))
    raise argparse.ArgumentTypeError(f"{text!r} is no {kind}: known are {known}{question}")
