"""The library's kernels as the compilers of GPUs see them."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from device_compilers import (
    amd_functions,
    amd_metadata,
    compile_cuda,
    compile_hip,
    find_nvrtc,
    has_zig,
    ptx_entries,
)

import kccl
from kccl.base import dtypes
from kccl.jit import names as kernels
from kccl.plan.spec import Request
from kccl.plan.specs import BY_NAME, SPECS

INCLUDE = Path(kccl.include_dir())
KERNELS = sorted(path.stem for path in (INCLUDE / "kccl" / "kernels").glob("*.cuh"))
SOURCE = "".join(f"#include <kccl/kernels/{name}.cuh>\n" for name in KERNELS)
LL16 = [name for name in KERNELS if name.endswith("_ll16")]
SENTINEL = [name for name in KERNELS if name.endswith("_sentinel")]
# Packets first, and then the staging.
PARTS = [name for name in KERNELS if name.endswith("_parts")]
# The collectives whose kernels consist of what the other kernels consist of too.
_AS_OTHERS = ("all_gather", "all_to_all", "gather", "reduce", "reduce_scatter", "scan", "scatter")
WITH_ALL_INSTRUCTIONS = [
    name for name in KERNELS if name not in BY_NAME or BY_NAME[name].collective not in _AS_OTHERS
]
# A kernel that streams through a ring (ring.cuh).
RING = Path(__file__).parents[1] / "kernels" / "stage_sum.cuh"
# What is compiled of a kernel that reduces: each width of an element, and floats and integers.
REDUCTIONS = {
    ("float", "Sum"): "float32",
    ("kccl::bf16", "Sum"): "bfloat16",
    ("int64_t", "Min"): "int64",
}

needs_nvrtc = pytest.mark.skipif(
    find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed"
)
needs_zig = pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed")


# Scalar registers of AMD spill to lanes of vector registers, not to memory, around the calls of the
# slow path. A small message has few such moves; long messages are bound by the links.
MOST_SCALAR_SPILLS = {name: 40 if name.endswith("_push_simple") else 32 for name in KERNELS}
MOST_SCALAR_SPILLS["broadcast_push_simple"] = 100
# Each part has a length and a place of its own.
MOST_SCALAR_SPILLS |= dict.fromkeys(PARTS, 60)
# The number of ranks that are reduced is not known when these are compiled.
MOST_SCALAR_SPILLS |= {"scan_push_simple": 100, "scan_direct_ll16": 40}
# A row has five arrays, and a column of each is held from before the wait.
MOST_SCALAR_SPILLS["all_reduce_rms_norm"] = 110
# A message has a pipe each way, with addresses, lengths and limits of its own.
MOST_SCALAR_SPILLS["send_recv"] = 60
# Vector registers of a lane's four units in a compute unit of CDNA3; and block-shared memory of a
# kernel: votes need a little, an array of each thread would need more.
VECTOR_REGISTERS, SHARED_BYTES = 512, 1024
# A block of so many threads has two waves on each unit, and fits once at least.
THREADS = 512
# The kernels are compiled for a number of ranks, so that their loops over ranks unroll.
WORLD_SIZE = 4


def expressions_of(kernel: str) -> list[str]:
    """The kernel's name in C++; several instances of a kernel that reduces."""
    path = RING if kernel == RING.stem else INCLUDE / "kccl" / "kernels" / f"{kernel}.cuh"
    parameters = kernels.parameters(path)
    name = f"kccl::kernels::{kernel}"
    if "class T" not in parameters:
        return [f"{name}<{WORLD_SIZE}>" if parameters else name]
    last = f", {WORLD_SIZE}" if "int WORLD_SIZE" in parameters else ""
    if "class Op" not in parameters:
        takes_type = BY_NAME[kernel].takes_type
        return [f"{name}<{each.cpp_name}{last}>" for each in dtypes.ALL if takes_type(each)]
    return [f"{name}<{element}, kccl::{op}{last}>" for element, op in _reductions(kernel)]


def runs_on_gpus(kernel: str) -> bool:
    """Whether the planner may choose a kernel on GPUs; others must compile, but may spill."""
    return _runs_on("cuda", kernel, "float32")


def _runs_on(backend: str, kernel: str, dtype: str) -> bool:
    request = partial(Request, nbytes=8, world_size=2, backend=backend, dtype=dtypes.of(dtype))
    specs = [spec for spec in SPECS if spec.name == kernel]
    return all(spec.why_not(request(spec.collective)) is None for spec in specs)


def _reductions(kernel: str) -> list[tuple[str, str]]:
    if not runs_on_gpus(kernel):
        return [("float", "Sum")]
    return [each for each, dtype in REDUCTIONS.items() if _runs_on("cuda", kernel, dtype)]


@dataclass
class Compiled:
    """What a compiler made of the kernels.

    Attributes:
        bodies: (kernel, assembly), one or more a kernel.
        spills: (kernel, whether it spills registers).
        assembly: All of it; of AMD only.
    """

    bodies: list[tuple[str, str]]
    spills: list[tuple[str, bool]]
    assembly: str = ""

    def of(self, kernel: str) -> list[str]:
        bodies = [body for name, body in self.bodies if name == kernel]
        assert bodies, f"the compiler made nothing of {kernel}"
        return bodies


def kernel_of(symbol: str) -> str | None:
    """The kernel that a mangled name belongs to; None for other functions."""
    match = re.match(r"_ZN4kccl7kernels(\d+)(\w+)", symbol)
    return match[2][: int(match[1])] if match else None


def kernels_for_cuda(
    names: list[str], include_dir: Path, *, source: str = SOURCE, arch: str = "sm_90a"
) -> Compiled:
    library = find_nvrtc()
    assert library is not None
    expressions = []
    for kernel in names:
        expressions += expressions_of(kernel)
    ptx, log = compile_cuda(library, source, expressions, arch, include_dir)
    bodies = [(kernel_of(symbol) or "", body) for symbol, body in ptx_entries(ptx).items()]
    spills = [
        (kernel_of(symbol) or "", frame != "0 bytes spill stores, 0 bytes spill loads")
        for symbol, frame in re.findall(
            r"Function properties for (\w+)\nptxas[ .]*\d+ bytes stack frame, ([^\n]*)", log
        )
    ]
    return Compiled(bodies, spills)


def kernels_for_hip(
    names: list[str],
    arch: str,
    folder: Path,
    include_dir: Path,
    *,
    source: str = SOURCE,
    instances: int | None = None,
) -> Compiled:
    """The kernels for an AMD GPU; of each at most so many instances."""
    for kernel in names:
        for each in expressions_of(kernel)[:instances]:
            if "<" in each:
                source += f"template KCCL_KERNEL void {each}(const KcclCall);\n"
    assembly = compile_hip(source, arch, folder, include_dir)
    bodies = [(kernel_of(symbol) or "", body) for symbol, body in amd_functions(assembly).items()]
    spills = [
        (
            kernel_of(symbol) or "",
            numbers["vgpr_spill_count"] > 0
            or numbers["sgpr_spill_count"] > MOST_SCALAR_SPILLS.get(kernel_of(symbol) or "", 0),
        )
        for symbol, numbers in amd_metadata(assembly).items()
    ]
    return Compiled(bodies, spills, assembly)


@contextmanager
def headers_without_rarities(parent: Path) -> Iterator[Path]:
    """Headers without scrubs and time-outs, so that only the code of every call is left."""
    folder = parent / "csrc"
    shutil.copytree(INCLUDE.parent, folder)
    for name, old, new in (
        ("channel.cuh", "entered = scrub(coop_, comm_, index_, awaited());", "entered = kKcclOk;"),
        (
            "wait.cuh",
            "!warp_may_go_on(comm, what, spent, now)",
            "((void)what, (void)spent, (void)now, true)",
        ),
    ):
        header = folder / "include" / "kccl" / name
        text = header.read_text()
        assert text.count(old) == 1, f"{name} changed: cut this out at its new place"
        header.write_text(text.replace(old, new))
    yield folder / "include"
    shutil.rmtree(folder)


def check_spills(compiled: Compiled) -> None:
    assert {name for name, _ in compiled.spills} >= set(KERNELS)
    spilling = [name for name, spills in compiled.spills if spills and runs_on_gpus(name)]
    assert not spilling, spilling
