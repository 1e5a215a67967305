"""Writes kernel_table.inc: which kernels the host core has, for which element types and operators.

The facts are those of kccl/plan/specs.py and each kernel's own template parameters. build_ffi.py
calls this before the compiler runs; the file lies in the build folder.
"""

from collections.abc import Iterable
from pathlib import Path

from kccl.base import dtypes
from kccl.jit.names import instance, parameters, path_of
from kccl.plan.spec import KernelSpec, needs_floats
from kccl.plan.specs import KERNELS

CSRC = Path(__file__).resolve().parents[1]


def entry(spec: KernelSpec) -> str:
    """What the table holds of a kernel, for one element type T and one operator Op."""

    def of(world_size: int) -> str:
        known = {"class T": "T", "class Op": "Op", "int WORLD_SIZE": str(world_size)}
        return instance(spec.name, CSRC, known)

    return f"by_world_size<{of(2)}, {of(0)}>" if spec.unrolls_for_two else f"by_address<{of(0)}>"


def kernel_table(types: Iterable[dtypes.Dtype] = dtypes.ALL) -> str:
    """The text of kernel_table.inc.

    Args:
        types: Element types of the kernels that reduce.
    """
    kernels = [spec for spec in KERNELS if "host" in spec.targets]
    reductions, others = [], []
    for spec in kernels:
        if "class Op" in parameters(path_of(spec.name, CSRC)):
            condition = "if constexpr (!kIsInteger<T>) " if needs_floats in spec.needs else ""
            where = f"{condition}table.kernel[{spec.constant}][dtype][op]"
            reductions.append(f"    {where} = {entry(spec)};")
        else:
            others.append(f"    table.kernel[{spec.constant}][0][0] = {entry(spec)};")
    return "\n".join(
        (
            "// Written by csrc/host/kernel_table.py.",
            *(f'#include "csrc/include/kccl/kernels/{spec.name}.cuh"' for spec in kernels),
            '#include "csrc/host/kernel_instances.h"',
            "",
            "namespace kccl::host {",
            "namespace {",
            "",
            "template <class T, class Op>",
            "constexpr void add_reductions(KernelTable& table, KcclDtype dtype, KcclOp op) {",
            *reductions,
            "}",
            "",
            "constexpr KernelTable all_kernels() {",
            "    KernelTable table = {};",
            *(
                f"    add_dtype<{dtype.cpp_name}>(table, kKccl{dtype.name.capitalize()});"
                for dtype in types
            ),
            *others,
            "    return table;",
            "}",
            "",
            "}  // namespace",
            "}  // namespace kccl::host",
            "",
        )
    )
