"""Reads nccl.h and cuda.h: which functions libkccl_nccl.so hands on."""

import os
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from ..base.errors import BackendError

_WHEELS = {"nccl.h": "nvidia-nccl-cu13", "cuda.h": "nvidia-cuda-runtime"}


def folder_of(header: str) -> Path:
    """Returns the folder of a header of CUDA's or NCCL's.

    Raises:
        BackendError: It is not there.
    """
    for folder in _folders():
        if (folder / header).is_file():
            return folder
    raise BackendError(
        f"{header} is not there: install the wheel {_WHEELS[header]}, or a CUDA toolkit and set "
        "CUDA_HOME"
    )


def _folders() -> Iterator[Path]:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    yield Path(home) / "include"
    spec = find_spec("nvidia")
    for wheels in (spec.submodule_search_locations or ()) if spec else ():
        yield from sorted(Path(wheels).glob("*/include"))
    yield Path("/usr/include")


def forwards(header: Path, entries: Path) -> str:
    """Returns definitions of NCCL's functions that the library does not answer itself.

    Args:
        header: nccl.h.
        entries: The source with those that it answers.
    """
    own = set(re.findall(r"^(?:ncclResult_t|const char\*) (nccl\w+)\(", entries.read_text(), re.M))
    text = _without_comments(header.read_text("utf-8"))
    # What is a macro on other systems does nothing.
    own |= set(re.findall(r"#\s*define\s+(p?nccl\w+)\(", text))
    results = r"ncclResult_t|const\s+char\s*\*|void"
    found = re.findall(rf"\b({results})\s*(p?nccl[A-Z]\w+)\s*\(([^()]*)\)\s*;", text)
    lines = [
        f"KCCL_FORWARD({result}, {name}, ({_words(parameters)}){_arguments(parameters)})"
        for result, name, parameters in found
        if name not in own
    ]
    return "\n".join(lines) + "\n"


def driver(header: Path, users: Iterable[Path]) -> str:
    """Returns definitions of the driver's functions that sources call.

    Args:
        header: cuda.h.
        users: The sources.
    """
    called = {
        name for path in users for name in re.findall(r"\b(cu[A-Z]\w+)\(", path.read_text("utf-8"))
    }
    text = _without_comments(header.read_text("utf-8"))
    lines = []
    for name in sorted(called):
        match = re.search(rf"\bCUresult\s+CUDAAPI\s+{name}\s*\(([^()]*)\)\s*;", text)
        if match is None:
            raise BackendError(f"{header} does not declare {name}")
        lines.append(f"KCCL_DRIVER({name}, ({_words(match[1])}){_arguments(match[1])})")
    return "\n".join(lines) + "\n"


def _without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)


def _words(parameters: str) -> str:
    return " ".join(parameters.split())


def _arguments(parameters: str) -> str:
    """Returns the names of parameters, each behind a comma."""
    names = [re.findall(r"\w+", each)[-1] for each in parameters.split(",") if each.strip()]
    return "".join(f", {name}" for name in names if name != "void")
