"""What a program gives mpi4py's calls for a message: [buffer, count, datatype] and its other forms.

A message that lies in host memory in one piece is used where it is. Any other goes through memory
of its own, and mpi4py itself copies it there or back, as a message of this process to itself. So
derived datatypes, MPI.BOTTOM, GPU arrays and arrays in Fortran's order mean what they mean to MPI.
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
# Messages of this process to itself, one at a time.
_self = MPI.COMM_SELF.Dup()
# DLPack's number of the host's memory.
_HOST = 1
_copying = threading.Lock()


class ByMpi(Exception):
    """The call is MPI's. The text says why.

    Either all ranks find the same, because the reason is what MPI wants to be the same on all; or
    this rank's arguments are wrong, and mpi4py raises the error for that. A call that mpi4py makes
    on one rank must not be refused here: the other ranks would wait for it in KCCL.
    """


class Message:
    """One side of a call.

    Attributes:
        datatype: The datatype of its elements.
        counts: The number of elements in each block.
        sizes: The number of bytes in each block, without gaps.
    """

    __slots__ = ("_buffer", "_displs", "_extent", "_memory", "counts", "datatype", "sizes")

    def __init__(self, spec: Any, blocks: int, *, writable: bool, is_vector: bool = False) -> None:
        """Reads what the program gave, by mpi4py's rules.

        Args:
            spec: What was given.
            blocks: The number of blocks, which are equal unless is_vector.
            writable: The call writes it.
            is_vector: The counts are those of the blocks, as Allgatherv takes them.

        Raises:
            ByMpi: mpi4py refuses it.
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
        """The elements where they are; None: they are not known to be in one piece of host memory.

        They may begin before the buffer or end behind it. MPI takes its address only.
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
        """All elements, one behind the other, for reading."""
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
        """Memory for the result, for keep(); the message's own where that is in one piece."""
        found = self._in_place()
        return np.empty(sum(self.sizes), _BYTE) if found is None else found

    def keep(self, result: _Bytes) -> None:
        """Puts a result into the message, unless it is there already."""
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
                # mpi4py takes such a displacement for a block of several only.
                address = MPI.Get_address(buffer) + displ * self._extent
                buffer, where = MPI.memory.fromaddress(address, 0), count
            found.append(([buffer, where, self.datatype], size))
        return found


def _copy(source: list[Any], target: list[Any]) -> None:
    with _copying:
        _self.Sendrecv(source, 0, 0, target, 0, 0)


def _split(spec: Any, *, is_vector: bool) -> tuple[Any, Any, Any, Any]:
    """Returns buffer, counts, displacements and datatype; None for what was not given."""
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
    """Returns the number of bytes of what was given as a buffer, and the code of its elements."""
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
        # DLPack, or a GPU array.
        num_bytes = MPI.buffer.frombuffer(buffer, readonly=True).nbytes
        if hasattr(buffer, "__cuda_array_interface__"):
            code = str(buffer.__cuda_array_interface__["typestr"])
            return num_bytes, code.lstrip("<=|")
        return num_bytes, np.dtype(dlpack.read(buffer, "buffer", -1).dtype.name).char
    except Exception as error:
        # Whatever the array's library raises.
        raise ByMpi(f"no buffer: {error}") from error


def _memory(buffer: Any, *, writable: bool) -> _Bytes | None:
    """Returns the host memory of a buffer; None: MPI must find it."""
    if buffer is None or buffer is MPI.BOTTOM or _is_elsewhere(buffer):
        return None
    try:
        found = np.frombuffer(buffer, _BYTE)
    except (BufferError, TypeError, ValueError):
        try:
            # By DLPack.
            theirs: Any = MPI.buffer.frombuffer(buffer, readonly=not writable)
            found = np.frombuffer(theirs, _BYTE)
        except Exception:
            # A GPU array, or one in Fortran's order: MPI reads it, or says why it cannot.
            return None
    if writable and not found.flags.writeable:
        raise ByMpi("a buffer that may not be written")
    return found


def _is_elsewhere(buffer: Any) -> bool:
    """Tells whether a buffer is, or may be, a GPU's memory: its address says nothing here."""
    if type(buffer) is np.ndarray:
        return False
    try:
        if hasattr(buffer, "__cuda_array_interface__"):
            return True
        device = getattr(buffer, "__dlpack_device__", None)
        return device is not None and device()[0] != _HOST
    except Exception:
        # Whatever the array's library raises.
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
    """Returns the number of elements in each block of a buffer."""
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
    """Returns a number for each block; None: what was given is one number."""
    try:
        found = list(values)
    except TypeError:
        return None
    if len(found) != blocks:
        raise ByMpi("counts of another length than there are ranks")
    return [_index(each) for each in found]
