"""Every kernel compiles for NVIDIA and AMD GPUs, to the instructions that the protocols rely on.

No GPU is needed: NVRTC and clang come as wheels.
"""

import re
import shutil
from collections.abc import Iterator
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
from kccl.plan.specs import SPECS, Request

INCLUDE = Path(kccl.include_dir())
KERNELS = sorted(path.stem for path in (INCLUDE / "kccl" / "kernels").glob("*.cuh"))
SOURCE = "".join(f"#include <kccl/kernels/{name}.cuh>\n" for name in KERNELS)
LL16 = [name for name in KERNELS if name.endswith("_ll16")]
SENTINEL = [name for name in KERNELS if name.endswith("_sentinel")]
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
pytestmark = pytest.mark.timeout(300)


# On AMD scalar registers spill to vector registers, not to memory. These kernels may do so, because
# their messages are so long that the links bound them.
SCALARS_MAY_SPILL = {name for name in KERNELS if name.endswith("_push_simple")}
# The kernels are compiled for a number of ranks, so that their loops over ranks unroll.
WORLD_SIZE = 4


def _expressions(kernel: str) -> list[str]:
    """The kernel's name in C++; several instances of a kernel that reduces."""
    path = RING if kernel == RING.stem else INCLUDE / "kccl" / "kernels" / f"{kernel}.cuh"
    parameters = kernels.parameters(path)
    name = f"kccl::kernels::{kernel}"
    if "class T" not in parameters:
        return [f"{name}<{WORLD_SIZE}>" if parameters else name]
    last = f", {WORLD_SIZE}" if "int WORLD_SIZE" in parameters else ""
    return [f"{name}<{element}, kccl::{op}{last}>" for element, op in _reductions(kernel)]


def _runs_on_gpus(kernel: str) -> bool:
    """Whether the planner may choose a kernel on GPUs; others must compile, but may spill."""
    return _runs_on("cuda", kernel, "float32")


def _runs_on(backend: str, kernel: str, dtype: str) -> bool:
    request = partial(Request, nbytes=8, world_size=2, backend=backend, dtype=dtypes.of(dtype))
    specs = [spec for spec in SPECS if spec.name == kernel]
    return all(spec.why_not(request(spec.collective)) is None for spec in specs)


def _reductions(kernel: str) -> list[tuple[str, str]]:
    if not _runs_on_gpus(kernel):
        return [("float", "Sum")]
    return [each for each, dtype in REDUCTIONS.items() if _runs_on("cuda", kernel, dtype)]


@dataclass
class Compiled:
    """What a compiler made of the kernels.

    Attributes:
        bodies: (kernel, assembly), one or more a kernel.
        spills: (kernel, whether it spills registers).
    """

    bodies: list[tuple[str, str]]
    spills: list[tuple[str, bool]]

    def of(self, kernel: str) -> list[str]:
        bodies = [body for name, body in self.bodies if name == kernel]
        assert bodies, f"the compiler made nothing of {kernel}"
        return bodies


def _kernel_of(symbol: str) -> str | None:
    """The kernel that a mangled name belongs to; None for other functions."""
    match = re.match(r"_ZN4kccl7kernels(\d+)(\w+)", symbol)
    return match[2][: int(match[1])] if match else None


def _cuda(
    names: list[str], include_dir: Path, *, source: str = SOURCE, arch: str = "sm_90a"
) -> Compiled:
    library = find_nvrtc()
    assert library is not None
    expressions = []
    for kernel in names:
        expressions += _expressions(kernel)
    ptx, log = compile_cuda(library, source, expressions, arch, include_dir)
    bodies = [(_kernel_of(symbol) or "", body) for symbol, body in ptx_entries(ptx).items()]
    spills = [
        (_kernel_of(symbol) or "", frame != "0 bytes spill stores, 0 bytes spill loads")
        for symbol, frame in re.findall(
            r"Function properties for (\w+)\nptxas[ .]*\d+ bytes stack frame, ([^\n]*)", log
        )
    ]
    return Compiled(bodies, spills)


def _hip(
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
        for each in _expressions(kernel)[:instances]:
            if "<" in each:
                source += f"template KCCL_KERNEL void {each}(const KcclCall);\n"
    assembly = compile_hip(source, arch, folder, include_dir)
    bodies = [(_kernel_of(symbol) or "", body) for symbol, body in amd_functions(assembly).items()]
    spills = [
        (
            _kernel_of(symbol) or "",
            numbers["vgpr_spill_count"] > 0
            or (numbers["sgpr_spill_count"] > 0 and _kernel_of(symbol) not in SCALARS_MAY_SPILL),
        )
        for symbol, numbers in amd_metadata(assembly).items()
    ]
    return Compiled(bodies, spills)


@pytest.fixture(scope="module")
def cuda() -> Compiled:
    return _cuda(KERNELS, INCLUDE)


@pytest.fixture(scope="module")
def hip(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return _hip(KERNELS, "gfx942", tmp_path_factory.mktemp("hip"), INCLUDE)


@pytest.fixture(scope="module")
def without_rarities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Headers without scrubs and time-outs, so that only the code of every call is left."""
    folder = tmp_path_factory.mktemp("without_rarities") / "csrc"
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


def _check_spills(compiled: Compiled) -> None:
    assert {name for name, _ in compiled.spills} >= set(KERNELS)
    assert [name for name, spills in compiled.spills if spills and _runs_on_gpus(name)] == []


# CUDA


@needs_nvrtc
def test_cuda_packets_move_as_two_64_bit_halves(cuda):
    for kernel in LL16 + SENTINEL:
        for body in cuda.of(kernel):
            assert "st.relaxed.sys.global.v2.b64" in body
            assert "ld.relaxed.sys.global.v2.b64" in body


@needs_nvrtc
def test_cuda_signals_release_and_waits_acquire(cuda):
    for kernel in ("barrier_direct", "signal"):
        assert all("st.release.sys.global.u32" in body for body in cuda.of(kernel))
    for kernel in ("barrier_direct", "wait"):
        assert all("ld.acquire.sys.global.u32" in body for body in cuda.of(kernel))
    # A barrier's packets: once, and not in each poll.
    for body in cuda.of("barrier_direct"):
        assert body.count("ld.acquire.sys.global.u64") == 1
    for body in cuda.of("grid_sync"):
        assert "red.release.gpu.global.add.u32" in body
        assert "ld.acquire.gpu.global.u32" in body


@needs_nvrtc
def test_cuda_kernels_have_no_bare_fence_and_nothing_volatile(cuda):
    for kernel in KERNELS:
        # Sentinel kernels fence between a re-arm and the next push, except in the first round of a
        # launch (sentinel.cuh). A barrier fences before its packets.
        is_fenced = kernel in SENTINEL or kernel == "barrier_direct"
        allowed = ["fence.acq_rel.sys;"] if is_fenced else []
        for body in cuda.of(kernel):
            # keep() makes volatile accesses to a word that no other thread reads.
            body = re.sub(r"\w+\.volatile\.u32 [^;]*\[memory_address\][^;]*;", "", body)
            found = re.findall(r"\b(?:fence|membar)\b.*|\w+\.volatile.*", body)
            assert found == allowed, kernel


@needs_nvrtc
def test_cuda_kernels_wait_for_those_before(cuda):
    """Every thread waits before it touches memory, so a graph may have the kernel as a programmatic
    dependent.
    """
    for kernel in KERNELS:
        for body in cuda.of(kernel):
            before, waits, after = body.partition("griddepcontrol.wait;")
            assert waits and "griddepcontrol" not in before and waits not in after, kernel
            touches = re.findall(r"\b(?:ld|st|red|atom|prefetch)\.(?!param)\S+", before)
            assert touches == [] and "@" not in before, kernel


@needs_nvrtc
def test_cuda_kernels_launch_dependents_if_the_call_asks_for_it(cuda):
    """They do so behind their pushes: see Channel::sent()."""
    asked = r"setp\.ne\.s32\s+(%p\d+), %r\d+, 1;[^@]*@\1 bra\s+\$\w+;\s+// begin inline asm\s+"
    for kernel in KERNELS:
        for body in cuda.of(kernel):
            launches = body.split("griddepcontrol.launch_dependents;")
            has_any = kernel in (*LL16, *SENTINEL, "barrier_direct")
            assert (len(launches) > 1) == has_any, kernel
            for before in launches[:-1]:
                assert re.search(asked + r"\Z", before), kernel
            # Each thread's first push comes before it.
            assert "st.relaxed.sys.global.v2.b64" in launches[0] or not has_any, kernel


@needs_nvrtc
def test_cuda_kernels_do_not_spill(cuda):
    _check_spills(cuda)


@needs_nvrtc
def test_cuda_packets_order_nothing_else(without_rarities):
    compiled = _cuda(LL16, without_rarities)
    for kernel in LL16:
        for body in compiled.of(kernel):
            assert re.findall(r"\w+\.(?:release|acquire|acq_rel|sc)\b.*", body) == []


@needs_nvrtc
def test_cuda_sentinel_words_order_nothing_else(without_rarities):
    compiled = _cuda(SENTINEL, without_rarities)
    for kernel in SENTINEL:
        for body in compiled.of(kernel):
            found = re.findall(r"\w+\.(?:release|acquire|acq_rel|sc)\b.*", body)
            assert set(found) == {"fence.acq_rel.sys;"}


@needs_nvrtc
def test_cuda_ring_copies_in_bulk_where_the_hardware_can():
    compiled = _cuda(["stage_sum"], INCLUDE, source=f'#include "{RING}"\n')
    (body,) = compiled.of("stage_sum")
    bulk = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    for instruction in (
        bulk,
        "mbarrier.init.shared::cta.b64",
        "mbarrier.arrive.expect_tx.release.cta",
        "mbarrier.arrive.release.cta",
        "mbarrier.try_wait.parity.acquire.cta",
        "fence.proxy.async",
    ):
        assert instruction in body
    # One thread of the warp starts a copy, so no thread copies by itself.
    assert "st.shared.v2" not in body
    assert ("stage_sum", False) in compiled.spills


@needs_nvrtc
def test_cuda_ring_copies_through_registers_elsewhere():
    source = f'#include "{RING}"\n'
    compiled = _cuda(["stage_sum"], INCLUDE, source=source, arch="sm_80")
    (body,) = compiled.of("stage_sum")
    assert "mbarrier" not in body and "cp.async" not in body
    for instruction in ("atom.acq_rel.cta.shared.add.u32", "ld.acquire.cta.shared.u32"):
        assert instruction in body
    assert "st.shared.v2" in body, "copies do not move 16 bytes at a time"
    assert ("stage_sum", False) in compiled.spills


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120"])
def test_cuda_kernels_compile_for_other_chips(arch):
    on_gpus = [kernel for kernel in KERNELS if _runs_on_gpus(kernel)]
    expressions = [_expressions(kernel)[0] for kernel in on_gpus]
    library = find_nvrtc()
    assert library is not None
    ptx, _ = compile_cuda(library, SOURCE, expressions, arch, INCLUDE)
    assert {_kernel_of(symbol) for symbol in ptx_entries(ptx)} >= set(on_gpus)
    for symbol, body in ptx_entries(ptx).items():
        # launches_dependents() in kccl/gpu/cuda.py relies on this.
        assert ("griddepcontrol.wait" in body) == (arch != "sm_80"), symbol


# HIP

SYSTEM_SCOPE_8_BYTES = r"(?:flat|global)_{}_dwordx2 .*\bsc0 sc1$"


@needs_zig
def test_amd_packets_move_as_8_byte_accesses_of_system_scope(hip):
    for kernel in LL16 + SENTINEL:
        for body in hip.of(kernel):
            for access in ("load", "store"):
                pattern = SYSTEM_SCOPE_8_BYTES.format(access)
                # Two halves a packet.
                assert len(re.findall(pattern, body, re.MULTILINE)) >= 2, (kernel, access)


@needs_zig
def test_amd_signals_write_caches_back_and_waits_invalidate_them(hip):
    for kernel in ("barrier_direct", "signal"):
        assert all("buffer_wbl2 sc0 sc1" in body for body in hip.of(kernel))
    for kernel in ("barrier_direct", "wait"):
        assert all("buffer_inv sc0 sc1" in body for body in hip.of(kernel))
    for body in hip.of("grid_sync"):
        assert re.search(r"buffer_wbl2 sc1$", body, re.MULTILINE)
        assert re.search(r"buffer_inv sc1$", body, re.MULTILINE)


@needs_zig
def test_amd_block_barriers_wait_for_stores(hip):
    for kernel in ("barrier_direct", "signal"):
        for body in hip.of(kernel):
            before = re.findall(
                r"^\s*(\S[^\n]*)\n(?:\s*;[^\n]*\n)*\s*s_barrier\b", body, re.MULTILINE
            )
            assert before, kernel
            assert all(re.match(r"s_waitcnt vmcnt\(0\)", line) for line in before), before


@needs_zig
def test_amd_kernels_do_not_spill(hip):
    _check_spills(hip)


@needs_zig
def test_amd_kernels_compile_for_gfx950(tmp_path):
    compiled = _hip(KERNELS, "gfx950", tmp_path, INCLUDE, instances=1)
    for kernel in KERNELS:
        assert compiled.of(kernel)


@needs_zig
def test_amd_packets_leave_the_caches_alone(without_rarities, tmp_path):
    compiled = _hip(LL16, "gfx942", tmp_path, without_rarities)
    for kernel in LL16:
        for body in compiled.of(kernel):
            assert re.findall(r"buffer_(?:wbl2|inv).*", body) == []


@needs_zig
def test_amd_sentinel_words_are_fenced_once(without_rarities, tmp_path):
    """A call has one write-back and one invalidation."""
    compiled = _hip(SENTINEL, "gfx942", tmp_path, without_rarities)
    for kernel in SENTINEL:
        for body in compiled.of(kernel):
            for instruction in ("buffer_wbl2 sc0 sc1", "buffer_inv sc0 sc1"):
                assert body.count(instruction) == 1, (kernel, instruction)


@needs_zig
def test_amd_ring_copies_through_registers(tmp_path):
    compiled = _hip(["stage_sum"], "gfx942", tmp_path, INCLUDE, source=f'#include "{RING}"\n')
    (body,) = compiled.of("stage_sum")
    assert "ds_write_b128" in body and "ds_add_rtn_u32" in body
    assert ("stage_sum", False) in compiled.spills
