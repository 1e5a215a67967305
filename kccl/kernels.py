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


def for_world(kernel: str, dtype: str, op: str, world_size: int, csrc: Path) -> tuple[str, str]:
    """A translation unit with one kernel, and how C++ names it there, for one number of ranks.

    Where the algorithm is a template of WORLD_SIZE, its loops over peers unroll.

    Args:
        kernel, dtype, op, csrc: As in expression().
        world_size: Of the communicator.
    """
    unit, name = source(kernel, csrc), expression(kernel, dtype, op, csrc)
    if not takes_world_size(csrc / "kernels" / f"{kernel}.cuh"):
        return unit, name
    algorithm = f"kccl::{kernel}<{_ELEMENTS[dtype]}, kccl::{op.capitalize()}, {world_size}>"
    body = f"{{ {algorithm}(kccl::block(), call); }}"
    return (
        f'{unit}extern "C" KCCL_KERNEL void {kernel}(KCCL_KERNEL_PARAM(KcclCall) call) {body}\n',
        kernel,
    )


@lru_cache(maxsize=64)
def takes_world_size(path: Path) -> bool:
    """Whether the algorithm in a file is a template of element type, operator and world size."""
    return "template <class T, class Op, int WORLD_SIZE, class Coop>" in path.read_text()
