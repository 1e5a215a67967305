"""Describes the extension kccl._core to cffi. Its declarations are the text of several .inc files.

Paths of sources are relative to the folder of setup.py, where cffi runs this. They go through
symbolic links in the package kccl, so that they are the same in a checkout and in an sdist.
"""

import sys
from pathlib import Path

from cffi import FFI

CSRC = Path(__file__).resolve().parents[1]
ENGINE = CSRC.parent / "engine"
# The folder of files that are written before the compiler runs.
GENERATED = Path("build", "generated")
DECLARATIONS = (
    CSRC / "include/kccl/abi.inc",
    CSRC / "host/api.inc",
    CSRC / "host/nodes.inc",
    CSRC / "host/chain.inc",
    CSRC / "host/routes.inc",
    CSRC / "host/parts.inc",
    CSRC / "host/staged.inc",
    CSRC / "sim/api.inc",
    ENGINE / "abi.inc",
    ENGINE / "host/api.inc",
)

SOURCES = [
    "host/core.cpp",
    "host/chain.cpp",
    "host/routes.cpp",
    "host/far_link.cpp",
    "host/mpi_progress.cpp",
    "host/nodes.cpp",
    "host/idle.cpp",
    "host/probe.cpp",
    "host/arguments.cpp",
    "host/dispatcher.cpp",
    "host/fastcall.cpp",
    "host/group.cpp",
    "host/gpu.cpp",
    "host/messages.cpp",
    "host/one_sided.cpp",
    "host/parts.cpp",
    "host/postings.cpp",
    "host/scaled.cpp",
    "host/staged.cpp",
    "host/normed.cpp",
    # In front of those of larger instruction sets: for a function that several have, the linker
    # takes the first one (tests/house/test_objects.py).
    "host/kernels_baseline.cpp",
    "host/kernels_x86_64_v3.cpp",
    "host/kernels_x86_64_v4.cpp",
    "sim/accesses.cpp",
    "sim/api.cpp",
    "sim/bounds.cpp",
    "sim/calls.cpp",
    "sim/clock.cpp",
    "sim/coops.cpp",
    "sim/copies.cpp",
    "sim/edges.cpp",
    "sim/engine.cpp",
    "sim/exchanges.cpp",
    "sim/faults.cpp",
    "sim/fiber.cpp",
    "sim/findings.cpp",
    "sim/hosts.cpp",
    "sim/launches.cpp",
    "sim/machine.cpp",
    "sim/meetings.cpp",
    "sim/memory.cpp",
    "sim/moves.cpp",
    "sim/polls.cpp",
    "sim/rules.cpp",
    "sim/schedule.cpp",
    "sim/shared.cpp",
    "sim/types.cpp",
    "sim/waits.cpp",
    "sim/watchdog.cpp",
]
ENGINE_SOURCES = [
    "answer.cpp",
    "batch.cpp",
    "compute.cpp",
    "compute_baseline.cpp",
    "compute_x86_64_v3.cpp",
    "compute_x86_64_v4.cpp",
    "compute_x86_64_vnni.cpp",
    "drafts.cpp",
    "engine.cpp",
    "experts.cpp",
    "generate.cpp",
    "logits.cpp",
    "ngrams.cpp",
    "pass.cpp",
    "sampler.cpp",
    "tasks.cpp",
]


def write_kernel_table() -> None:
    """Writes the host's table of kernels, unless it is up to date."""
    sys.path.insert(0, str(Path.cwd()))
    from kccl.csrc.host.kernel_table import kernel_table

    text, path = kernel_table(), GENERATED / "kernel_table.inc"
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


write_kernel_table()
ffibuilder = FFI()
ffibuilder.cdef("".join(path.read_text() for path in DECLARATIONS))
# The function through which the engine's host executor calls a drafter written in Python
# (KcclEngineDrafter). Python defines it.
ffibuilder.cdef(
    'extern "Python" uint32_t kccl_engine_ask_python(void *, const int32_t *, uint32_t, uint32_t, '
    "int32_t *);"
)
ffibuilder.set_source(
    "kccl._core",
    '#include "csrc/host/host.h"\nextern "C" {\n'
    '#include "csrc/host/nodes.inc"\n#include "csrc/host/chain.inc"\n'
    '#include "csrc/host/routes.inc"\n#include "csrc/host/parts.inc"\n'
    '#include "csrc/host/staged.inc"\n'
    '#include "csrc/sim/api.inc"\n'
    '#include "engine/abi.inc"\n#include "engine/host/api.inc"\n}\n',
    sources=[
        *(f"kccl/csrc/{name}" for name in SOURCES),
        *(f"kccl/engine/host/{name}" for name in ENGINE_SOURCES),
    ],
    depends=[
        # setup.py has the compiler's flags.
        "setup.py",
        str(ENGINE / "abi.inc"),
        *(
            str(path)
            for folder in (
                CSRC / "include",
                CSRC / "host",
                CSRC / "sim",
                ENGINE / "host",
                GENERATED,
            )
            for path in folder.rglob("*")
            if path.suffix in (".cuh", ".h", ".hpp", ".inc")
        ),
    ],
    include_dirs=["kccl", str(GENERATED)],
    source_extension=".cpp",
    py_limited_api=True,
)
