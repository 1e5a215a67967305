"""Describes the extension kccl._core to cffi, from abi.inc and both api.inc read verbatim."""

from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).resolve().parents[1]
DECLARATIONS = ("include/kccl/abi.inc", "host/api.inc", "sim/api.inc")

SOURCES = [
    "host/core.cpp",
    "host/idle.cpp",
    "host/probe.cpp",
    "host/dispatcher.cpp",
    "host/fastcall.cpp",
    "host/gpu.cpp",
    "host/kernels_baseline.cpp",
    "host/kernels_x86_64_v3.cpp",
    "host/kernels_x86_64_v4.cpp",
    "sim/accesses.cpp",
    "sim/api.cpp",
    "sim/clock.cpp",
    "sim/copies.cpp",
    "sim/engine.cpp",
    "sim/fiber.cpp",
    "sim/findings.cpp",
    "sim/hosts.cpp",
    "sim/machine.cpp",
    "sim/meetings.cpp",
    "sim/memory.cpp",
    "sim/moves.cpp",
    "sim/polls.cpp",
    "sim/rules.cpp",
    "sim/schedule.cpp",
    "sim/types.cpp",
]

ffibuilder = FFI()
ffibuilder.cdef("".join((CSRC / name).read_text() for name in DECLARATIONS))
ffibuilder.set_source(
    "kccl._core",
    '#include "csrc/host/host.h"\nextern "C" {\n#include "csrc/sim/api.inc"\n}\n',
    # Relative to setup.py and through the package's symbolic link: the same in checkout and sdist.
    sources=[f"kccl/csrc/{name}" for name in SOURCES],
    depends=[
        str(path)
        for folder in (
            "include/kccl",
            "include/kccl/kernels",
            "include/kccl/targets",
            "host",
            "sim",
        )
        for path in (CSRC / folder).iterdir()
        if path.suffix in (".cuh", ".h", ".inc")
    ],
    include_dirs=["kccl"],
    source_extension=".cpp",
    py_limited_api=True,
)
