"""Every kernel compiles for NVIDIA's GPUs, to the instructions that the protocols rely on.

No GPU is needed: NVRTC comes as a wheel.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from compiled_kernels import (
    INCLUDE,
    KERNELS,
    LL16,
    PARTS,
    RING,
    SENTINEL,
    SOURCE,
    WITH_ALL_INSTRUCTIONS,
    Compiled,
    check_spills,
    expressions_of,
    headers_without_rarities,
    kernel_of,
    kernels_for_cuda,
    needs_nvrtc,
    runs_on_gpus,
)
from device_compilers import compile_cuda, find_nvrtc, ptx_entries

pytestmark = [pytest.mark.takes(40), pytest.mark.long]
# keep() makes volatile accesses to a word that no other thread reads.
KEEPS = re.compile(r"\w+\.volatile\.u32 [^;]*\[memory_address\][^;]*;")


@pytest.fixture(scope="module")
def cuda() -> Compiled:
    return kernels_for_cuda(KERNELS, INCLUDE)


@pytest.fixture(scope="module")
def without_rarities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with headers_without_rarities(tmp_path_factory.mktemp("without_rarities")) as include_dir:
        yield include_dir


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
        assert body.count("fence.acquire.sys;") == 1
    for body in cuda.of("grid_sync"):
        assert "red.release.gpu.global.add.u32" in body
        assert "fence.acquire.gpu;" in body


@needs_nvrtc
def test_cuda_kernels_have_no_bare_fence_and_nothing_volatile(cuda):
    for kernel in KERNELS:
        # Sentinel kernels fence between a re-arm and the next push, except in the first round of a
        # launch (sentinel.cuh).
        allowed = ["fence.acq_rel.sys;"] if kernel in SENTINEL else []
        # A barrier releases before its packets and acquires behind them. A grid's barrier releases
        # by its add; a scrub of the board has three.
        if kernel == "barrier_direct":
            allowed = ["fence.release.sys;", "fence.acquire.sys;"]
        # The sender acquires where the receiver has made a pipe's words old.
        if kernel == "send_recv":
            allowed = ["fence.acquire.sys;"]
        if kernel in ("grid_sync", "grid_exchange"):
            allowed = ["fence.acquire.gpu;"] * (3 if kernel == "grid_exchange" else 1)
        for body in cuda.of(kernel):
            found = re.findall(r"\b(?:fence|membar)\b.*|\w+\.volatile.*", KEEPS.sub("", body))
            assert found == allowed, kernel


@needs_nvrtc
def test_cuda_kernels_wait_for_those_before(cuda):
    """Every thread waits before it touches memory, so a graph may have the kernel as a programmatic
    dependent.
    """
    for kernel in KERNELS:
        for body in cuda.of(kernel):
            before, waits, _ = KEEPS.sub("", body).partition("griddepcontrol.wait;")
            assert waits and "griddepcontrol" not in before, kernel
            touches = re.findall(r"\b(?:ld|st|red|atom|prefetch)\.(?!param)\S+", before)
            assert touches == [], kernel
            # A thread of send_recv finds its message before it waits, which takes branches.
            assert "@" not in before or kernel == "send_recv", kernel


@needs_nvrtc
def test_cuda_kernels_launch_dependents_if_the_call_asks_for_it(cuda):
    """They do so behind their pushes: see Channel::sent(). send_recv does so behind its wait: the
    next call's blocks wait for the end of this one.
    """
    asked = r"setp\.ne\.s32\s+(%p\d+), %r\d+, 1;[^@]*@\1 bra\s+\$\w+;\s+// begin inline asm\s+"
    for kernel in KERNELS:
        for body in cuda.of(kernel):
            launches = body.split("griddepcontrol.launch_dependents;")
            has_any = kernel in (*LL16, *SENTINEL, *PARTS, "barrier_direct", "all_reduce_rms_norm")
            assert (len(launches) > 1) == (has_any or kernel == "send_recv"), kernel
            for before in launches[:-1]:
                assert re.search(asked + r"\Z", before), kernel
            # Each thread's first push comes before it.
            assert "st.relaxed.sys.global.v2.b64" in launches[0] or not has_any, kernel


@needs_nvrtc
def test_cuda_kernels_do_not_spill(cuda):
    check_spills(cuda)


@needs_nvrtc
def test_cuda_packets_order_nothing_else(without_rarities):
    compiled = kernels_for_cuda(LL16, without_rarities)
    for kernel in LL16:
        for body in compiled.of(kernel):
            assert re.findall(r"\w+\.(?:release|acquire|acq_rel|sc)\b.*", body) == []


@needs_nvrtc
def test_cuda_sentinel_words_order_nothing_else(without_rarities):
    compiled = kernels_for_cuda(SENTINEL, without_rarities)
    for kernel in SENTINEL:
        for body in compiled.of(kernel):
            found = re.findall(r"\w+\.(?:release|acquire|acq_rel|sc)\b.*", body)
            assert set(found) == {"fence.acq_rel.sys;"}


@needs_nvrtc
def test_cuda_ring_copies_in_bulk_where_the_hardware_can():
    compiled = kernels_for_cuda(["stage_sum"], INCLUDE, source=f'#include "{RING}"\n')
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
    compiled = kernels_for_cuda(["stage_sum"], INCLUDE, source=source, arch="sm_80")
    (body,) = compiled.of("stage_sum")
    assert "mbarrier" not in body and "cp.async" not in body
    for instruction in ("atom.acq_rel.cta.shared.add.u32", "ld.acquire.cta.shared.u32"):
        assert instruction in body
    assert "st.shared.v2" in body, "copies do not move 16 bytes at a time"
    assert ("stage_sum", False) in compiled.spills


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_100a"])
def test_cuda_kernels_compile_for_other_chips(arch):
    on_gpus = [kernel for kernel in WITH_ALL_INSTRUCTIONS if runs_on_gpus(kernel)]
    expressions = [expressions_of(kernel)[0] for kernel in on_gpus]
    library = find_nvrtc()
    assert library is not None
    ptx, _ = compile_cuda(library, SOURCE, expressions, arch, INCLUDE)
    assert {kernel_of(symbol) for symbol in ptx_entries(ptx)} >= set(on_gpus)
    for symbol, body in ptx_entries(ptx).items():
        # launches_dependents() in kccl/gpu/cuda.py relies on this.
        assert ("griddepcontrol.wait" in body) == (arch != "sm_80"), symbol
