"""Reads the arguments for a message of mpi4py's calls: [buffer, count, datatype] and other forms.

A message that is contiguous in host memory is used in place. Any other message is copied to or from
a temporary array. mpi4py itself makes the copy, as a message of this process to itself. So derived
datatypes, MPI.BOTTOM, GPU arrays and arrays in Fortran order mean what they mean to MPI.
"""

import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from ..base import dlpack

_BYTE = np.dtype(np.uint8)
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# The communicator for messages of this process to itself. Only the thread that holds the lock
# _copying may use it.
_self = MPI.COMM_SELF.Dup()
# DLPack's number for host memory (kDLCPU).
_HOST = 1
_copying = threading.Lock()


class ByMpi(Exception):
    """Raised when MPI, not KCCL, must make a call. The text says why.

    It may be raised for two kinds of reasons only. Either the reason depends on what MPI requires
    to be equal on all ranks, so all ranks raise it. Or this rank's arguments are wrong, so that
    mpi4py raises an error. For a call that mpi4py would make on this rank alone it must not be
    raised: the other ranks would wait for this rank in KCCL.
    """


class Message:
    """The send buffer or the receive buffer of a call, in blocks for its ranks.

    Attributes:
        datatype: The MPI datatype of its elements.
        counts: The number of elements in each block.
        sizes: The number of bytes in each block, without the gaps of a derived datatype.
    """

    __slots__ = ("_buffer", "_displs", "_extent", "_memory", "counts", "datatype", "sizes")

    def __init__(self, spec: Any, blocks: int, *, writable: bool, is_vector: bool = False) -> None:
        """Reads an argument of a call by mpi4py's rules.

        Args:
            spec: The argument: a buffer, or a list as [buffer, count, datatype].
            blocks: The number of blocks. They have equal lengths unless `is_vector`.
            writable: Whether the call writes the message.
            is_vector: Whether `spec` has a count for each block, as in Allgatherv.

        Raises:
            ByMpi: mpi4py refuses the argument, too.
        """
        buffer, counts, displs, datatype = _split(spec, is_vector=is_vector)
        num_bytes, text = _size_and_format(buffer)
        try:
            self.datatype = _datatype(datatype if datatype is not None else text)
            lower, self._extent = self.datatype.Get_extent()
            size = self.datatype.Get_size()
        except (KeyError, TypeError, MPI.Exception) as error:
            raise ByMpi("a datatype that is none") from error
        self._buffer = buffer
        if is_vector:
            self.counts = _block_counts(counts, blocks, num_bytes, self._extent)
            self._displs = _block_displs(displs, self.counts)
        else:
            displ = 0 if displs is None else _whole(displs)
            if counts is None:
                count = _inferred(num_bytes - displ * self._extent, self._extent, blocks)
            else:
                count = _whole(counts)
            self.counts = [count] * blocks
            self._displs = [displ + count * block for block in range(blocks)]
        self.sizes = [count * size for count in self.counts]
        is_plain = self.datatype.is_predefined and (lower, self._extent) == (0, size)
        self._memory = _memory(buffer, writable=writable) if is_plain else None

    def _in_place(self) -> _Bytes | None:
        """Returns a view of the message's bytes if they are contiguous in host memory, else None.

        It also returns None if the message begins before the buffer or ends behind it. MPI allows
        that, because it takes only the buffer's address.
        """
        if self._memory is None:
            return None
        at = self._displs[0] if self._displs else 0
        begin, dense = at * self._extent, at
        for count, displ in zip(self.counts, self._displs, strict=True):
            if displ != dense and count:
                return None
            dense += count
        end = dense * self._extent
        if begin < 0 or end > self._memory.size:
            return None
        return self._memory[begin:end]

    def given(self) -> _Bytes:
        """Returns the bytes of all blocks, one after another, for reading."""
        found = self._in_place()
        if found is None:
            found = self.room()
            offset = 0
            for spec, size in self._pieces():
                piece = found[offset : offset + size]
                _copy(spec, [piece, size, MPI.PACKED])
                offset += size
        return found

    def room(self) -> _Bytes:
        """Returns memory for the call's result, to pass to keep(). It is the message's own memory
        if that is contiguous, and else a new array.
        """
        found = self._in_place()
        return np.empty(sum(self.sizes), _BYTE) if found is None else found

    def keep(self, result: _Bytes) -> None:
        """Copies a result into the message, unless it was written to its memory already."""
        mine = self._in_place()
        if mine is None:
            offset = 0
            for spec, size in self._pieces():
                _copy([result[offset : offset + size], size, MPI.PACKED], spec)
                offset += size
        elif mine.ctypes.data != result.ctypes.data:
            mine[:] = result

    def _pieces(self) -> list[tuple[list[Any], int]]:
        found = []
        for count, displ, size in zip(self.counts, self._displs, self.sizes, strict=True):
            if size == 0:
                continue
            buffer, where = self._buffer, (count, displ) if displ else count
            if displ < 0:
                # mpi4py takes a negative displacement only in calls of several blocks, and Sendrecv
                # has one. So the address is computed here.
                address = MPI.Get_address(buffer) + displ * self._extent
                buffer, where = MPI.memory.fromaddress(address, 0), count
            found.append(([buffer, where, self.datatype], size))
        return found


def _copy(source: list[Any], target: list[Any]) -> None:
    with _copying:
        _self.Sendrecv(source, 0, 0, target, 0, 0)


def _split(spec: Any, *, is_vector: bool) -> tuple[Any, Any, Any, Any]:
    """Returns (buffer, counts, displacements, datatype) of an argument, each None if not given."""
    if not isinstance(spec, (list, tuple)):
        return spec, None, None, None
    counts: Any = None
    displs: Any = None
    datatype: Any = None
    pairs = (tuple,) if is_vector else (tuple, list)
    if len(spec) == 2:
        buffer, counts = spec
        if isinstance(counts, (MPI.Datatype, str)):
            counts, datatype = None, counts
    elif len(spec) == 3:
        buffer, counts, datatype = spec
    elif len(spec) == 4:
        return tuple(spec)
    else:
        raise ByMpi("a list of no form that is known")
    if isinstance(counts, pairs):
        if len(counts) != 2:
            raise ByMpi("a list of no form that is known")
        counts, displs = counts
    return buffer, counts, displs, datatype


def _size_and_format(buffer: Any) -> tuple[int, str | None]:
    """Returns a buffer's number of bytes, and the type code of its elements.

    For None and MPI.BOTTOM it returns (0, None).
    """
    if buffer is None or buffer is MPI.BOTTOM:
        return 0, None
    try:
        view = memoryview(buffer)
    except TypeError:
        pass
    except (BufferError, ValueError) as error:
        raise ByMpi(str(error)) from error
    else:
        if not view.contiguous:
            raise ByMpi("a buffer that is not contiguous")
        return view.nbytes, view.format
    try:
        # The object has no buffer protocol of Python. It may be a GPU array, or have DLPack.
        num_bytes = MPI.buffer.frombuffer(buffer, readonly=True).nbytes
        if hasattr(buffer, "__cuda_array_interface__"):
            code = str(buffer.__cuda_array_interface__["typestr"])
            return num_bytes, code.lstrip("<=|")
        return num_bytes, np.dtype(dlpack.read(buffer, "buffer", -1).dtype.name).char
    except Exception as error:
        # The array's library may raise any exception.
        raise ByMpi(f"no buffer: {error}") from error


def _memory(buffer: Any, *, writable: bool) -> _Bytes | None:
    """Returns the host memory of a buffer; None if only MPI can access the buffer."""
    if buffer is None or buffer is MPI.BOTTOM or _is_elsewhere(buffer):
        return None
    try:
        found = np.frombuffer(buffer, _BYTE)
    except (BufferError, TypeError, ValueError):
        try:
            # mpi4py also reads objects that have DLPack but not Python's buffer protocol.
            theirs: Any = MPI.buffer.frombuffer(buffer, readonly=not writable)
            found = np.frombuffer(theirs, _BYTE)
        except Exception:
            # NumPy cannot view the buffer, as that of a GPU array or of an array in Fortran order.
            # MPI must read or write it, or raise an error.
            return None
    if writable and not found.flags.writeable:
        raise ByMpi("a buffer that may not be written")
    return found


def _is_elsewhere(buffer: Any) -> bool:
    """Tells whether a buffer is, or may be, GPU memory, which the host must not read."""
    if type(buffer) is np.ndarray:
        return False
    try:
        if hasattr(buffer, "__cuda_array_interface__"):
            return True
        device = getattr(buffer, "__dlpack_device__", None)
        return device is not None and device()[0] != _HOST
    except Exception:
        # The array's library may raise any exception. Then the memory may be a GPU's.
        return True


def _datatype(said: Any) -> Any:
    if isinstance(said, MPI.Datatype):
        return said
    if not isinstance(said, str):
        raise TypeError
    return MPI._typedict[said.lstrip("@<")]


def _index(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as error:
        raise ByMpi("a count that is no number") from error


def _whole(value: Any) -> int:
    number = _index(value)
    if number < 0:
        raise ByMpi("a negative count")
    return number


def _inferred(num_bytes: int, extent: int, blocks: int) -> int:
    """Returns the number of elements in each block of a buffer without a count.

    Raises:
        ByMpi: The buffer has no whole number of elements for each block.
    """
    if num_bytes == 0:
        return 0
    if extent <= 0 or num_bytes < 0 or num_bytes % extent or num_bytes // extent % blocks:
        raise ByMpi("a buffer of no whole number of elements")
    return num_bytes // extent // blocks


def _block_counts(counts: Any, blocks: int, num_bytes: int, extent: int) -> list[int]:
    if counts is None:
        count = _inferred(num_bytes, extent, 1)
        return [count // blocks + (count % blocks > block) for block in range(blocks)]
    found = _numbers(counts, blocks)
    if found is None:
        return [_whole(counts)] * blocks
    if min(found) < 0:
        raise ByMpi("a negative count")
    return found


def _block_displs(displs: Any, counts: Sequence[int]) -> list[int]:
    if displs is None:
        return [sum(counts[:block]) for block in range(len(counts))]
    found = _numbers(displs, len(counts))
    return [_index(displs) * block for block in range(len(counts))] if found is None else found


def _numbers(values: Any, blocks: int) -> list[int] | None:
    """Returns `values` as a list of one number for each block; None if it is a single number."""
    try:
        found = list(values)
    except TypeError:
        return None
    if len(found) != blocks:
        raise ByMpi("counts of another length than there are ranks")
    return [_index(each) for each in found]
