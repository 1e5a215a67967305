"""Maps memory without a descriptor.

Python's mmap objects keep a duplicate of the file's descriptor for as long as the mapping lives.
"""

import ctypes
import mmap
import os

from .abi import ffi

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value


def map_shared(fd: int, nbytes: int) -> memoryview:
    """Maps the beginning of a file for reading and writing; fd -1: new memory of this process.

    The memory stays mapped until nobody refers to the view, or to an array over it.

    Raises:
        OSError: The operating system refused.
    """
    flags = mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if fd < 0 else 0)
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    unmap = _libc.munmap
    memory = ffi.gc(ffi.cast("char *", address), lambda _: unmap(address, nbytes), nbytes)
    return memoryview(ffi.buffer(memory, nbytes))
