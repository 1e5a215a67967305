"""Finds a C++ compiler: the system's, or else the clang of the ziglang wheel.

setup.py runs this file before the package exists. So it imports nothing of kccl.
"""

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec

_C_DRIVERS = {"g++": "gcc", "clang++": "clang", "c++": "cc"}


def cure(pip_install: str) -> str:
    """Returns advice on how to install a compiler. `pip_install` is extras.pip_install()."""
    return f"Install g++ or clang++, or set CXX, or: {pip_install} ziglang==0.17.0"


def find_cxx(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """Returns the command of a C++20 compiler as words: $CXX, or else the first compiler that is
    found. None if there is none.
    """
    if environ.get("CXX"):
        return shlex.split(environ["CXX"])
    for name in _C_DRIVERS:
        if shutil.which(name):
            return [name]
    return zig("c++") if find_spec("ziglang") else None


def zig(language: str) -> list[str]:
    """Returns the command of the ziglang wheel's clang for a language, "c++" or "cc"."""
    # By default Zig compiles for this machine's CPU, but the result may run on another machine.
    return [sys.executable, "-m", "ziglang", language, "-mcpu=baseline"]


def is_zig(command: list[str]) -> bool:
    """Tells whether zig() made this command."""
    return "ziglang" in command


def linker_of(cxx: list[str]) -> list[str]:
    """Returns the command that links objects of `cxx`, without a C++ library where that is
    possible.
    """
    if is_zig(cxx):
        # Without -nostdlib, Zig first builds the C library, which takes about 15 s. The process
        # that loads the result has one already.
        return [*zig("cc"), "-nostdlib"]
    for at, word in enumerate(cxx):
        parts = re.fullmatch(r"(.*?)(g\+\+|clang\+\+|c\+\+)(-[\d.]+)?", word)
        if parts:
            driver = f"{parts[1]}{_C_DRIVERS[parts[2]]}{parts[3] or ''}"
            if shutil.which(driver):
                return [*cxx[:at], driver, *cxx[at + 1 :]]
    return cxx
