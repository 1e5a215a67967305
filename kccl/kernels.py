"""What the library's own kernels are called in C++, for compilers at run time."""

from functools import lru_cache
from pathlib import Path

from . import abi

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
    return f'#include "{csrc}/kernels/{kernel}.cuh"\n'


def expression(kernel: str, dtype: str, op: str, csrc: Path) -> str:
    """The kernel as C++ names it: for kernels that reduce, the instance for this type and operator.

    Args:
        kernel: Its name, which is its file's.
        dtype: Element type; kernels that move bytes have one form for all.
        op: Operator, as in "sum".
        csrc: Root of the device source.
    """
    name = f"kccl::kernels::{kernel}"
    if not is_template(csrc / "kernels" / f"{kernel}.cuh"):
        return name
    assert op in abi.OPS
    return f"{name}<{_ELEMENTS[dtype]}, kccl::{op.capitalize()}>"


@lru_cache(maxsize=64)
def is_template(path: Path) -> bool:
    """Whether the kernel in a file has a form for each element type and operator."""
    return "template <class T, class Op>\nKCCL_KERNEL " in path.read_text()
