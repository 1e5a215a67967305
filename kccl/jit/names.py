"""What the library's own kernels are called in C++, for compilers at run time and for setup.py."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from ..base import dtypes


def path_of(kernel: str, csrc: Path) -> Path:
    """The file of a kernel, which bears its name."""
    return csrc / "include" / "kccl" / "kernels" / f"{kernel}.cuh"


def source(kernel: str, csrc: Path) -> str:
    """A translation unit with this one kernel of the library."""
    return f'#include "{path_of(kernel, csrc)}"\n'


def expression(kernel: str, dtype: str, op: str, csrc: Path, world_size: int = 0) -> str:
    """The kernel as C++ names it: the instance for this type, operator and number of ranks.

    Args:
        kernel: Its name, which is its file's.
        dtype: Element type; kernels that move bytes have one form for all.
        op: Operator, as in "sum".
        csrc: Root of the device source.
        world_size: Of the communicator, where the algorithm's loops over ranks are to unroll; 0:
            any.
    """
    known = {
        "class T": dtypes.of(dtype).cpp_name,
        "class Op": f"kccl::{op.capitalize()}",
        "int WORLD_SIZE": str(world_size),
    }
    return instance(kernel, csrc, known)


def instance(kernel: str, csrc: Path, known: Mapping[str, str]) -> str:
    """The kernel as C++ names it, with its template parameters as `known` has them."""
    values = [known[parameter] for parameter in parameters(path_of(kernel, csrc))]
    return f"kccl::kernels::{kernel}" + (f"<{', '.join(values)}>" if values else "")


@lru_cache(maxsize=64)
def parameters(path: Path) -> tuple[str, ...]:
    """The template parameters of the kernel in a file, as in ("class T", "class Op")."""
    pattern = r"^template <([^<>]*)>\nKCCL_KERNEL(?:_OF\(.*\))?\s"
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    return tuple(found[1].split(", ")) if found else ()
