"""Writes kernel_table.inc: which kernels the host core has, for which element types and operators.

The list follows from kccl/plan/specs.py and from each kernel's template parameters. build_ffi.py
calls this module before the compiler runs, and writes the file into the build folder.

A kernel that reduces has one instance, which moves elements of any type as bytes. If it cuts
messages into payloads, it has a second instance for elements that are longer than a payload. At run
time an instance finds the functions that reduce elements of its call's type by its call's operator
in a second table (reducers.h).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from kccl.base import dtypes
from kccl.base.dtypes import Dtype
from kccl.jit.names import cpp_op, instance, parameters, path_of
from kccl.plan.ops import ops_of
from kccl.plan.spec import KernelSpec, needs_floats
from kccl.plan.specs import KERNELS

CSRC = Path(__file__).resolve().parents[1]
PAYLOAD_BYTES = 8
"""As kPayloadBytes in payload.cuh."""
# min and max of the other common types are faster by tiles (bench/LOG.md, 2026-11-30).
_MINIMA_BY_ROWS = (dtypes.float16, dtypes.int64)
FAST = {
    dtypes.same_bits(dtype, op)
    for dtype in (*dtypes.COMMON_FLOATS, dtypes.int32, dtypes.int64)
    for op in ("sum", "prod", "min", "max", "avg")
    if op in ops_of(dtype) and (op not in ("min", "max") or dtype in _MINIMA_BY_ROWS)
}
"""Pairs of an element type and an operator that have loops of their own over whole rows
(kRowReducer in reducers.h).
"""


def entry(spec: KernelSpec, type_name: str = "", op: str = "") -> str:
    """Returns the C++ expression that is a kernel's entry in the table.

    Args:
        spec: The kernel.
        type_name: The element type's name in C++, if the kernel has such a template parameter.
        op: The operator's name in C++, likewise.
    """

    def of(world_size: int) -> str:
        known = {"class T": type_name, "class Op": op, "int WORLD_SIZE": str(world_size)}
        return instance(spec.name, CSRC, known)

    if spec.unrolls_for_two:
        return f"by_world_size<{of(2)}, {of(0)}>"
    return f"by_address<{of(0)}>"


def reducer(dtype: Dtype, op: str) -> str:
    """Returns the C++ name of the Reducer for an element type and an operator (reducers.h)."""
    same = dtypes.same_bits(dtype, op)
    kind = "Row" if same in FAST else "Tile"
    return f"k{kind}Reducer<{same[0].cpp_name}, {cpp_op(same[1])}>"


def units(spec: KernelSpec, dtype: Dtype) -> int:
    """Returns as how many units a kernel that reduces takes an element.

    Mostly it is the element's bytes. But if messages are cut into payloads, a longer element is one
    unit, so that it is not cut. Other kernels cut only at cache lines.
    """
    is_cut = spec.protocol != "simple" and dtype.itemsize > PAYLOAD_BYTES
    return 1 if is_cut else dtype.itemsize


def cases(types: Iterable[Dtype]) -> Iterator[tuple[Dtype, str, str]]:
    """Yields each element type with each operator that takes it, and their indices in C++ text."""
    for dtype in types:
        for op in ops_of(dtype):
            yield dtype, op, f"[{dtype.constant}][kKccl{op.capitalize()}]"


def kernel_table(types: Iterable[Dtype] = dtypes.ALL) -> str:
    """Returns the text of kernel_table.inc.

    Args:
        types: The element types of the kernels that reduce.
    """
    types = tuple(types)
    kernels = [spec for spec in KERNELS if "host" in spec.targets]
    lines: list[str] = []
    for spec in kernels:
        if "class Op" in parameters(path_of(spec.name, CSRC)):
            taken = [each for each in types if needs_floats not in spec.needs or each.has_nan]
            lines += (
                f"    table.kernel[{spec.constant}]{at} = "
                f"{entry(spec, f'Raw<{dtype.itemsize // units(spec, dtype)}>', 'Tabled')};"
                for dtype, op, at in cases(taken)
            )
            lines += (
                f"    table.units[{spec.constant}][{dtype.constant}] = {units(spec, dtype)};"
                for dtype in taken
            )
        elif spec.takes_type is not None:
            lines += (
                f"    table.kernel[{spec.constant}][{dtype.constant}][kKcclSum] = "
                f"{entry(spec, dtypes.same_bits(dtype, 'sum')[0].cpp_name)};"
                for dtype in types
                if spec.takes_type(dtype)
            )
        else:
            lines.append(f"    table.kernel[{spec.constant}][0][0] = {entry(spec)};")
    return "\n".join(
        (
            "// Written by csrc/host/kernel_table.py.",
            *(f'#include "csrc/include/kccl/kernels/{spec.name}.cuh"' for spec in kernels),
            '#include "csrc/host/kernel_instances.h"',
            "",
            "namespace kccl::host {",
            "namespace {",
            "",
            f"static_assert(kPayloadBytes == {PAYLOAD_BYTES});",
            "",
            "constexpr ReducerTable all_reducers() {",
            "    ReducerTable table = {};",
            *(f"    table.at{at} = {reducer(dtype, op)};" for dtype, op, at in cases(types)),
            "    return table;",
            "}",
            "constexpr ReducerTable kReducers = all_reducers();",
            "",
            "inline const Reducer& reducer_of(const KcclCall& call) {",
            "    return kReducers.at[call.dtype][call.op];",
            "}",
            "",
            "constexpr KernelTable all_kernels() {",
            "    KernelTable table = {};",
            *lines,
            *(f"    table.rows{at} = {reducer(dtype, op)}.rows;" for dtype, op, at in cases(types)),
            "    return table;",
            "}",
            "",
            "}  // namespace",
            "}  // namespace kccl::host",
            "",
        )
    )
