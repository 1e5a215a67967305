"""The C++ compilers of this machine."""

import shutil

import pytest


def _found(*names: str) -> list[str]:
    return [name for name in names if shutil.which(name)]


# Under c++ there is mostly one of the others.
CXX = _found("g++", "clang++") or _found("c++")


def cxx() -> str:
    """The first of them. Without one the test is skipped."""
    return CXX[0] if CXX else pytest.skip("no C++ compiler: g++, clang++ or c++")
