"""Calls with op premul_sum(): each rank multiplies its input first, and the collective sums.

A call is up to three kernels of this rank, which csrc/host/scaled.cpp runs one after another: scale
stores the products in memory of the library, the collective sums them, and narrow rounds the sums
to the caller's type. The collective runs with op "sum" and the products' type.
"""

from typing import TYPE_CHECKING, Any

from ..backends.base import Backend
from ..base.abi import ffi, lib
from ..base.dtypes import Dtype
from ..plan.choice import Plan
from ..plan.ops import PremulSum

if TYPE_CHECKING:
    from .collective import Case

_ALIGNMENT = 128


def is_scaled(case: "Case") -> bool:
    """Tells whether a call's input is multiplied first."""
    return isinstance(case.fields.get("op"), PremulSum)


def summed(case: "Case") -> tuple[Dtype, int]:
    """Returns the element type and the message's bytes of the collective that a call makes."""
    if not is_scaled(case):
        return case.x.dtype, case.nbytes
    wide = case.x.dtype.accumulator
    return wide, case.nbytes // case.x.dtype.itemsize * wide.itemsize


def make(backend: Backend, case: "Case", plan: Plan, channel: int) -> Any:
    """Returns a KcclHostOp, as Backend.call(), for a call whose input is multiplied first.

    Args:
        backend: The backend.
        case: The call.
        plan: The plan of the call's sum.
        channel: The channel.
    """
    op, dtype, wide = case.fields["op"], case.x.dtype, case.x.dtype.accumulator
    fields, count = case.fields | {"dtype": wide.name, "op": "sum"}, case.count
    if case.parts is not None:
        ratio = wide.itemsize // dtype.itemsize
        fields |= case.parts.times(ratio).fields()
        count *= ratio
    rounds = wide != dtype and case.has_result
    products_bytes = -(-case.x.count * wide.itemsize // _ALIGNMENT) * _ALIGNMENT
    # If the result is as long as the input, the sums overwrite the products, so no second temporary
    # array is needed.
    is_in_place = case.out.count == case.x.count
    sums_bytes = case.out.count * wide.itemsize if rounds and not is_in_place else 0
    room = backend.temporary(products_bytes + sums_bytes, channel)
    factor = op.bits(dtype)
    scale = backend.call("scale", dtype=dtype.name, count=case.x.count, factor=factor)
    total = plan.handle(backend, count=count, channel=channel, **fields)
    narrow = ffi.NULL
    if rounds:
        narrow = backend.call("narrow", dtype=dtype.name, count=case.out.count)
    made = ffi.new("KcclScaledOp *")
    made.scale, made.sum, made.narrow = scale, total, narrow
    made.products = room
    made.sums = room if is_in_place else room + products_bytes
    if backend.has_streams:
        made.op = ffi.cast("KcclGpuOp *", total)[0]
    else:
        made.op.op = total[0]
    made.op.op.kernel = lib.kccl_run_scaled
    made.op.op.is_new = 0  # the ranks compare the call of the sum, not this one around it
    keep = made, scale, total, narrow
    return ffi.gc(ffi.addressof(made, "op", "op"), lambda _, keep=keep: None)
