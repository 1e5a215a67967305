"""The compiled extension, made by cffi from csrc/host/build_ffi.py."""

from typing import Any

ffi: Any
lib: Any
