"""Every kernel compiles for AMD's GPUs, to the instructions that the protocols rely on.

No GPU is needed: clang comes as a wheel.
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
    SHARED_BYTES,
    THREADS,
    VECTOR_REGISTERS,
    WITH_ALL_INSTRUCTIONS,
    Compiled,
    check_spills,
    headers_without_rarities,
    kernel_of,
    kernels_for_hip,
    needs_zig,
    runs_on_gpus,
)
from device_compilers import amd_functions, amd_metadata

from kccl.engine.monokernel.source import KERNELS as ENGINE

pytestmark = [pytest.mark.long, pytest.mark.takes(20)]


@pytest.fixture(scope="module")
def hip(tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return kernels_for_hip(KERNELS, "gfx942", tmp_path_factory.mktemp("hip"), INCLUDE)


@pytest.fixture(scope="module")
def without_rarities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with headers_without_rarities(tmp_path_factory.mktemp("without_rarities")) as include_dir:
        yield include_dir


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
    check_spills(hip)


@needs_zig
def test_amd_flags_wait_for_the_write_back_of_caches(hip):
    """Clang 22 forgets the wait: see release() in mem_hip.cuh. Without it a flag may overtake its
    data.
    """
    num = 0
    for name, body in amd_functions(hip.assembly).items():
        for behind in re.findall(r"^\tbuffer_wbl2 [^\n]*\n\s*([^\n]*)", body, re.MULTILINE):
            assert behind.startswith("s_waitcnt vmcnt(0)"), f"{name}: {behind}"
            num += 1
    assert num > len(KERNELS)


@needs_zig
def test_amd_blocks_fit_on_every_compute_unit(hip):
    for symbol, numbers in amd_metadata(hip.assembly).items():
        kernel = kernel_of(symbol)
        if kernel is None or not runs_on_gpus(kernel):
            continue
        waves_of_a_unit = numbers["max_flat_workgroup_size"] // 64 // 4
        assert numbers["vgpr_count"] * min(waves_of_a_unit, 2) <= VECTOR_REGISTERS, kernel
        assert numbers["group_segment_fixed_size"] <= SHARED_BYTES, kernel
        # With counts a kernel needs more registers: kMostPartsThreads.
        least = 256 if kernel in (*PARTS, "all_reduce_rms_norm") else THREADS
        assert numbers["max_flat_workgroup_size"] >= least, kernel
        # The stack of the slow path, for which each lane has memory.
        assert numbers["private_segment_fixed_size"] <= 256, kernel


@needs_zig
def test_amd_kernels_begin_without_a_copy_of_the_call(hip):
    """A call whose address is passed on would lie in private memory, each thread with its own."""
    for kernel in KERNELS:
        for body in hip.of(kernel):
            before, _, _ = body.partition("s_cbranch")
            assert "scratch_" not in before, kernel


@needs_zig
def test_amd_accesses_with_a_scope_are_global(hip):
    """A flat access with a scope would wait for block-shared memory, too."""
    for kernel in KERNELS:
        for body in hip.of(kernel):
            assert re.findall(r"^\tflat_\w+ .* sc1$", body, re.MULTILINE) == [], kernel


@needs_zig
def test_amd_polls_sleep(hip):
    for kernel in (*LL16, *SENTINEL, "barrier_direct", "grid_sync", "grid_exchange", "wait"):
        assert all("s_sleep 1" in body for body in hip.of(kernel)), kernel


@needs_zig
def test_amd_waits_read_a_clock_of_constant_rate(hip):
    assert "s_memrealtime" in hip.assembly and "s_memtime" not in hip.assembly


@needs_zig
def test_amd_kernels_compile_for_gfx950(tmp_path):
    compiled = kernels_for_hip(WITH_ALL_INSTRUCTIONS, "gfx950", tmp_path, INCLUDE, instances=1)
    for kernel in WITH_ALL_INSTRUCTIONS:
        assert compiled.of(kernel)
    # There clang may move an array of each thread into block-shared memory.
    for symbol, numbers in amd_metadata(compiled.assembly).items():
        kernel = kernel_of(symbol)
        if kernel is not None and runs_on_gpus(kernel):
            assert numbers["group_segment_fixed_size"] <= SHARED_BYTES, kernel


def test_no_element_of_a_vector_is_cast_by_the_compilers_bit_cast():
    """Clang reads element 0 instead, and says nothing. platform::bit_cast() copies bytes."""
    sources = [*INCLUDE.rglob("*.cuh"), *INCLUDE.rglob("*.h"), *ENGINE.rglob("*.cuh")]
    assert len(sources) > 50
    for path in sources:
        casts = re.findall(r"__builtin_bit_cast\([^;]*;", path.read_text("utf-8"))
        assert [cast for cast in casts if "[" in cast] == [], path.name


@needs_zig
def test_amd_packets_leave_the_caches_alone(without_rarities, tmp_path):
    compiled = kernels_for_hip(LL16 + SENTINEL, "gfx942", tmp_path, without_rarities)
    for kernel in LL16 + SENTINEL:
        for body in compiled.of(kernel):
            assert re.findall(r"buffer_(?:wbl2|inv).*", body) == [], kernel


@needs_zig
def test_amd_ring_copies_through_registers(tmp_path):
    compiled = kernels_for_hip(
        ["stage_sum"], "gfx942", tmp_path, INCLUDE, source=f'#include "{RING}"\n'
    )
    (body,) = compiled.of("stage_sum")
    assert "ds_write_b128" in body and "ds_add_rtn_u32" in body
    # What streams takes no place in the caches.
    assert re.search(r"global_load_dwordx4 .*\bnt$", body, re.MULTILINE)
    assert ("stage_sum", False) in compiled.spills
