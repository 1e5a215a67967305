"""The C++ names of the library's own kernels, for run-time compilers and for setup.py."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ..base import dtypes


def cpp_op(op: str) -> str:
    """Returns the type of an operator in device source."""
    return f"kccl::{op.capitalize()}"


def path_of(kernel: str, csrc: Path) -> Path:
    """Returns the path of a kernel's file, which has the kernel's name."""
    return csrc / "include" / "kccl" / "kernels" / f"{kernel}.cuh"


def source(kernel: str, csrc: Path) -> str:
    """Returns a translation unit that has only this kernel of the library."""
    return f'#include "{path_of(kernel, csrc)}"\n'


def expression(kernel: str, dtype: str, op: str, csrc: Path, world_size: int = 0) -> str:
    """Returns the C++ name of a kernel's instance for an element type, operator and world size.

    Args:
        kernel: Name of the kernel.
        dtype: Element type. Kernels that move bytes have one instance for all types; those that
            reduce have one for all types and operators whose bits agree.
        op: Operator, as in "sum".
        csrc: Root of the device source.
        world_size: World size for which loops over ranks are unrolled; 0 for no unrolling.
    """
    kind, op = dtypes.same_bits(dtypes.of(dtype), op)
    known = {
        "class T": kind.cpp_name,
        "class Op": cpp_op(op),
        "int WORLD_SIZE": str(world_size),
    }
    return instance(kernel, csrc, known)


def instance(kernel: str, csrc: Path, known: Mapping[str, str]) -> str:
    """Returns the C++ name of a kernel's instance. `known` gives the value of each template
    parameter.
    """
    values = [known[parameter] for parameter in parameters(path_of(kernel, csrc))]
    return f"kccl::kernels::{kernel}" + (f"<{', '.join(values)}>" if values else "")


@lru_cache(maxsize=64)
def parameters(path: Path) -> tuple[str, ...]:
    """Returns the template parameters of the kernel in a file, as in ("class T", "class Op")."""
    pattern = r"^template <([^<>]*)>\nKCCL_KERNEL(?:_OF\(.*\))?\s"
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return tuple(found[1].split(", ")) if found else ()
