"""The engine's part of the compiled core: what engine/host/api.inc declares.

It is in the same shared library as the rest of kccl, because it uses the host's waits.
"""

from kccl._core import ffi, lib

__all__ = ["ffi", "lib"]
