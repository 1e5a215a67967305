"""What the library's own kernels are called in C++, for compilers at run time."""

import re
from functools import lru_cache
from pathlib import Path

from ..base import abi

_ELEMENTS = {
    "float32": "float",
    "float64": "double",
    "float16": "kccl::f16",
    "bfloat16": "kccl::bf16",
    "int32": "int32_t",
    "int64": "int64_t",
}


def source(kernel: str, csrc: Path) -> str:
    """A translation unit with this one kernel of the library.

    Args:
        kernel: Its name, which is its file's.
        csrc: Root of the device source.
    """
    return f'#include "{csrc}/include/kccl/kernels/{kernel}.cuh"\n'


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
    assert op in abi.OPS
    known = {
        "class T": _ELEMENTS[dtype],
        "class Op": f"kccl::{op.capitalize()}",
        "int WORLD_SIZE": str(world_size),
    }
    values = [
        known[name] for name in parameters(csrc / "include" / "kccl" / "kernels" / f"{kernel}.cuh")
    ]
    return f"kccl::kernels::{kernel}" + (f"<{', '.join(values)}>" if values else "")


@lru_cache(maxsize=64)
def parameters(path: Path) -> tuple[str, ...]:
    """The template parameters of the kernel in a file, as in ("class T", "class Op")."""
    pattern = r"^template <([^<>]*)>\nKCCL_KERNEL(?:_OF\(.*\))?\s"
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    return tuple(found[1].split(", ")) if found else ()
