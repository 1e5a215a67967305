"""Maps memory without a descriptor.

Python's mmap objects keep a duplicate of the file's descriptor for as long as the mapping lives.
"""

import ctypes
import mmap
import os
import weakref
from typing import Any

from .abi import ffi

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


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
    # The buffer keeps this object. Why no memoryview of it: when the cyclic collector clears one,
    # others that still hold its memory crash.
    memory = ffi.cast("char *", address)
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    return ffi.buffer(memory, nbytes)
