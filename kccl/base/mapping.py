"""Maps memory without a descriptor.

Python's mmap objects keep a duplicate of the file's descriptor for as long as the mapping lives.
"""

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Hashable
from typing import Any

from .abi import ffi

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_FAILED = ctypes.c_void_p(-1).value
_LOWEST_BIT = bytes(number & 1 for number in range(256))

# Address of each current mapping -> (its file, its size in bytes). Memory without a file has its
# address in place of the file. Ranks that are threads map the same files, which count once.
_mapped: dict[int, tuple[Hashable, int]] = {}


def place_of(address: int) -> tuple[str, int]:
    """Finds whether memory at an address is shared with other processes.

    Returns:
        The device and inode of the file that is mapped there, and the offset in it: they are the
        same in every process of this machine that maps the file. For memory of this process alone:
        "" and the address.

    Raises:
        OSError: /proc/self/maps cannot be read.
    """
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as mappings:
        for line in mappings:
            ends, permissions, offset, device, inode, *_ = line.split(maxsplit=5)
            begin, end = (int(each, 16) for each in ends.split("-"))
            if begin <= address < end:
                is_shared = permissions.endswith("s") and inode != "0"
                at = int(offset, 16) + address - begin
                return (f"{device} {inode}", at) if is_shared else ("", address)
    return "", address


def map_shared(fd: int, nbytes: int) -> Any:
    """Maps the beginning of a file for reading and writing; fd -1: new memory of this process.

    Returns:
        A writable buffer. The memory stays mapped until nobody refers to it or to an array over it.

    Raises:
        OSError: The operating system refused.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    # The buffer keeps `memory` alive. A memoryview would be unsafe in its place: when the cyclic
    # garbage collector clears one, others that still use its memory crash.
    memory = ffi.cast("char *", address)
    weakref.finalize(memory, _unmap, address, nbytes).atexit = False
    _mapped[address] = (_file_of(fd) if fd >= 0 else address), nbytes
    return ffi.buffer(memory, nbytes)


def _file_of(fd: int) -> Hashable:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _unmap(address: int, nbytes: int) -> None:
    _mapped.pop(address, None)
    _libc.munmap(address, nbytes)


def mapped_bytes() -> int:
    """Returns the bytes that map_shared() has mapped. A file that several ranks map counts once."""
    return sum(dict(list(_mapped.values())).values())


def untouched_bytes() -> int:
    """Returns the bytes of mapped memory that no process has written yet, which no memory limit
    counts.
    """
    files = {file: (address, nbytes) for address, (file, nbytes) in list(_mapped.items())}
    return sum(_untouched_bytes(address, nbytes) for address, nbytes in files.values())


def _untouched_bytes(address: int, nbytes: int) -> int:
    pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
    if _libc.mincore(address, nbytes, pages) != 0:
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            # Another thread has unmapped the memory since it was listed, so none of it counts.
            return 0
        raise OSError(code, os.strerror(code))
    # mincore() writes a byte for each page. Its lowest bit says whether the page exists; the other
    # bits are undefined.
    resident = mmap.PAGESIZE * pages.raw.translate(_LOWEST_BIT).count(1)
    return max(nbytes - resident, 0)
