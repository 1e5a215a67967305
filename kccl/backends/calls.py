"""Fills the structs of a call of the library from names."""

from typing import Any

from ..base import abi
from ..plan.specs import BY_NAME


def fill_op(
    handle: Any, comm: Any, kernel: str, dtype: str = "float32", op: str = "sum", **fields: int
) -> None:
    """Fills a KcclHostOp, except its function.

    Args:
        handle: The KcclHostOp.
        comm, kernel, dtype, op, fields: See fill_call().
    """
    fill_call(handle.call, comm, kernel, dtype, op, **fields)
    handle.bytes_per_count = BY_NAME[kernel].message_bytes(1, dtype, comm.world_size)


def fill_call(
    call: Any, comm: Any, kernel: str, dtype: str = "float32", op: str = "sum", **fields: int
) -> None:
    """Fills a KcclCall.

    Args:
        call: The KcclCall.
        comm: The KcclDeviceComm that the kernel gets.
        kernel, dtype, op: Names.
        fields: The values of other fields of KcclCall.
    """
    call.comm = comm[0]
    call.kernel = abi.KERNELS[kernel]
    call.dtype = abi.DTYPES[dtype]
    call.op = abi.OPS[op]
    for name, value in fields.items():
        setattr(call, name, value)
