"""Maps MPI's datatypes and operators to KCCL's, for the reductions that KCCL makes.

Tables have handles of datatypes as keys, because mpi4py's objects cannot be hashed. Datatypes of
one kind and size, as MPI.LONG and MPI.INT64_T, map to one type, because a program may pass NumPy's
long on one rank and its long long on another.
"""

from typing import Any

import numpy as np
from mpi4py import MPI

from ..plan.ops import Op

_KINDS = {
    "i": "SIGNED_CHAR SHORT INT LONG LONG_LONG INT8_T INT16_T INT32_T INT64_T AINT OFFSET COUNT "
    "INTEGER INTEGER1 INTEGER2 INTEGER4 INTEGER8",
    "u": "UNSIGNED_CHAR UNSIGNED_SHORT UNSIGNED UNSIGNED_LONG UNSIGNED_LONG_LONG "
    "UINT8_T UINT16_T UINT32_T UINT64_T",
    "f": "FLOAT DOUBLE REAL DOUBLE_PRECISION REAL4 REAL8",
    "c": "C_COMPLEX C_FLOAT_COMPLEX C_DOUBLE_COMPLEX CXX_FLOAT_COMPLEX CXX_DOUBLE_COMPLEX "
    "COMPLEX DOUBLE_COMPLEX COMPLEX8 COMPLEX16",
    "b": "C_BOOL CXX_BOOL",
    "V": "BYTE",
}
_MOST_BYTES = {"i": 8, "u": 8, "f": 8, "c": 16, "b": 1, "V": 1}
_SUMS: dict[str, Op] = {"SUM": "sum", "PROD": "prod"}
_ORDERS: dict[str, Op] = {"MIN": "min", "MAX": "max"}
_BITS: dict[str, Op] = {"BAND": "band", "BOR": "bor", "BXOR": "bxor"}
# The operators that MPI allows for each kind of datatype, without LAND, LOR and LXOR of integers.
_OPS: dict[str, dict[str, Op]] = {
    "i": _SUMS | _ORDERS | _BITS,
    "u": _SUMS | _ORDERS | _BITS,
    "f": _SUMS | _ORDERS,
    "c": _SUMS,
    "b": {"LAND": "min", "LOR": "max", "LXOR": "bxor"},
    "V": _BITS,
}
# NumPy's codes of element types that KCCL can reduce, and whose MPI datatype mpi4py infers.
_CODES = "?bhilqBHILQfdFD"


def _dtype(kind: str, size: int) -> "np.dtype[Any]":
    # MPI.BYTE takes bitwise operators only, so uint8 gives the right result.
    code = {"V": "u1", "b": "?"}.get(kind, f"{kind}{size}")
    return np.dtype(code)


def _types() -> dict[int, tuple["np.dtype[Any]", str]]:
    found = {}
    for kind, names in _KINDS.items():
        for name in names.split():
            datatype = getattr(MPI, name, MPI.DATATYPE_NULL)
            # An MPI that was built without Fortran does not have all types.
            if datatype == MPI.DATATYPE_NULL:
                continue
            size = datatype.Get_size()
            if 0 < size <= _MOST_BYTES[kind] and datatype.Get_extent() == (0, size):
                found[datatype.handle] = _dtype(kind, size), kind
    return found


# Handle of a datatype -> (NumPy's dtype, key of _KINDS).
_TYPES = _types()
# Key of _KINDS -> handle of an operator -> KCCL's name of the operator.
_NAMES = {
    kind: {getattr(MPI, name).handle: said for name, said in ops.items()}
    for kind, ops in _OPS.items()
}


def reduction(datatype: Any, op: Any) -> tuple["np.dtype[Any]", Op] | None:
    """Returns KCCL's element type and operator for a reduction, or None if MPI must make it.

    The result depends only on the arguments. MPI requires them to be equal on all ranks, so all
    ranks choose alike between KCCL and MPI.

    Args:
        datatype: A datatype of MPI.
        op: An operator of MPI.
    """
    known = _TYPES.get(datatype.handle)
    if known is None:
        return None
    dtype, kind = known
    name = _NAMES[kind].get(op.handle)
    return None if name is None else (dtype, name)


def _natural() -> set[tuple["np.dtype[Any]", Any]]:
    found: set[tuple[np.dtype[Any], Any]] = set()
    for kind in "iufcb":
        for name in _KINDS[kind].split():
            datatype = getattr(MPI, name, MPI.DATATYPE_NULL)
            if datatype.handle in _TYPES:
                found.add((_TYPES[datatype.handle][0], id(datatype)))
    return found


# (dtype of a NumPy array, id of an MPI datatype that describes its elements).
_NATURAL = _natural()


def array_of(spec: Any, blocks: int = 1) -> Any:
    """Returns the array of a message [array, datatype] or [array, count, datatype].

    If datatype or count do not describe the whole NumPy array, and for any other form of message,
    it returns `spec`.

    Args:
        spec: A list or tuple, or anything else that mpi4py takes.
        blocks: The number of blocks in the array. The count is that of one block.
    """
    if isinstance(spec, (list, tuple)) and 2 <= len(spec) <= 3:
        array = spec[0]
        is_natural = type(array) is np.ndarray and (array.dtype, id(spec[-1])) in _NATURAL
        if is_natural and (len(spec) == 2 or _is_whole(spec[1], array.size / blocks)):
            return array
    return spec


def _is_whole(count: Any, wanted: float) -> bool:
    return type(count) is int and count == wanted


def _quick() -> dict[tuple["np.dtype[Any]", int], Op]:
    found = {}
    for code in _CODES:
        for op in (getattr(MPI, name) for name in _SUMS | _ORDERS | _BITS | _OPS["b"]):
            answer = reduction(MPI._typedict[code], op)
            if answer is not None and answer[0] == np.dtype(code):
                found[np.dtype(code), id(op)] = answer[1]
    return found


REDUCES = _quick()
"""(dtype of a NumPy array, id of an operator of MPI) -> KCCL's operator. It agrees with reduction()
for the datatype that mpi4py infers from the array. An id is safe as a key, because MPI's operators
live as long as the process."""

MOVES = frozenset(np.dtype(code) for code in _CODES)
"""dtypes of NumPy arrays that KCCL can move, and whose MPI datatype mpi4py infers."""
