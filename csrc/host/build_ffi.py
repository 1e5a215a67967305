"""Describes the extension kccl._core to cffi, from abi.inc and api.inc read verbatim."""

from pathlib import Path

from cffi import FFI

HOST = Path(__file__).resolve().parent
ABI = HOST.parent / "include" / "kccl" / "abi.inc"

SOURCES = [
    "core.cpp",
    "idle.cpp",
    "probe.cpp",
    "fastcall.cpp",
    "kernels_baseline.cpp",
    "kernels_x86_64_v3.cpp",
    "kernels_x86_64_v4.cpp",
]

ffibuilder = FFI()
ffibuilder.cdef(ABI.read_text() + (HOST / "api.inc").read_text())
ffibuilder.set_source(
    "kccl._core",
    '#include "csrc/host/host.h"',
    # Relative to setup.py and through the package's symbolic link: the same in checkout and sdist.
    sources=[f"kccl/csrc/host/{name}" for name in SOURCES],
    depends=[
        str(path)
        for pattern in ("include/kccl/*", "kernels/*", "host/*.h", "host/*.inc")
        for path in HOST.parent.glob(pattern)
    ],
    include_dirs=["kccl"],
    source_extension=".cpp",
    py_limited_api=True,
)
