"""Host, GPUs and the simulator lay out the structs of engine/abi.inc in the same way."""

import re

import pytest
from device_compilers import compile_cuda, compile_hip, find_nvrtc, has_zig
from kernel_copies import ABI

import kccl
from kccl.engine.base.core import ffi, lib

TEXT = ABI.read_text()
STRUCTS = re.findall(r"^typedef struct (\w+) \{", TEXT, re.MULTILINE)
NUMBERS = re.findall(r"^    (kKccl\w+) = -?\d+", TEXT, re.MULTILINE)


def checks(*, has_offsetof=True):
    """Assertions that each size, offset and number is what cffi has found out."""
    for name in STRUCTS:
        yield f"sizeof({name}) == {ffi.sizeof(name)} && alignof({name}) == {ffi.alignof(name)}"
        for field, told in ffi.typeof(name).fields:
            yield f"sizeof({name}::{field}) == {ffi.sizeof(told.type)}"
            if has_offsetof:
                yield f"__builtin_offsetof({name}, {field}) == {told.offset}"
    for name in NUMBERS:
        yield f"{name} == {getattr(lib, name)}"


def source(**options):
    asserted = "".join(f"static_assert({check});\n" for check in checks(**options))
    return f'#include "abi.cuh"\n{asserted}KCCL_KERNEL void nothing() {{}}\n'


def test_every_struct_and_number_is_looked_at():
    assert len(STRUCTS) == TEXT.count("struct ") and len(STRUCTS) > 5
    assert len(NUMBERS) == TEXT.count(" = ") and len(NUMBERS) > 20


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_clang_lays_them_out_for_amd(arch, headers, tmp_path):
    if not has_zig():
        pytest.skip("the ziglang wheel is not installed")
    compile_hip(source(), arch, tmp_path, headers)


def test_nvrtc_lays_them_out(headers):
    library = find_nvrtc()
    if library is None:
        pytest.skip("the nvidia-cuda-nvrtc wheel is not installed")
    # It has no offsetof. Offsets follow from the fields' order, sizes and alignments.
    compile_cuda(library, source(has_offsetof=False), ["nothing"], "sm_90a", headers)


def test_a_cpu_lays_them_out(headers):
    kccl.compile(source(), ["nothing"], target="sim", include_dirs=[headers])


def test_a_struct_that_differs_is_found(headers, tmp_path):
    changed = TEXT.replace("uint32_t num_bytes;", "uint64_t num_bytes;")
    assert changed != TEXT
    (tmp_path / "abi.inc").unlink()
    (tmp_path / "abi.inc").write_text(changed)
    with pytest.raises(kccl.CompileError, match="static assertion failed"):
        kccl.compile(source(), ["nothing"], target="sim", include_dirs=[headers])
