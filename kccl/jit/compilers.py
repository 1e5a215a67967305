"""Which C++ compiler this machine has: the system's, else the clang of the ziglang wheel.

setup.py runs this file by itself, before there is a package: it imports nothing of kccl.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec

_C_DRIVERS = {"g++": "gcc", "clang++": "clang", "c++": "cc"}
CURE = "Install g++ or clang++, or set CXX, or: pip install ziglang==0.17.0"


def find_cxx(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """The command of a C++20 compiler, as words: $CXX, else the first that is there, else None."""
    if environ.get("CXX"):
        return shlex.split(environ["CXX"])
    for name in _C_DRIVERS:
        if shutil.which(name):
            return [name]
    return zig("c++") if find_spec("ziglang") else None


def zig(language: str) -> list[str]:
    """The command of the ziglang wheel's clang for a language, "c++" or "cc"."""
    # Zig compiles for the CPU it runs on unless told otherwise, and what it made may go elsewhere.
    return [sys.executable, "-m", "ziglang", language, "-mcpu=baseline"]


def is_zig(command: list[str]) -> bool:
    """Whether a command is one of zig()'s."""
    return "ziglang" in command


def linker_of(cxx: list[str]) -> list[str]:
    """The command that links what `cxx` compiled, without a C++ library where that is possible."""
    if is_zig(cxx):
        # Zig would first build the C library, which takes some 15 s; the process has one already.
        return [*zig("cc"), "-nostdlib"]
    for at, word in enumerate(cxx):
        parts = re.fullmatch(r"(.*?)(g\+\+|clang\+\+|c\+\+)(-[\d.]+)?", word)
        if parts:
            driver = f"{parts[1]}{_C_DRIVERS[parts[2]]}{parts[3] or ''}"
            if shutil.which(driver):
                return [*cxx[:at], driver, *cxx[at + 1 :]]
    return cxx
