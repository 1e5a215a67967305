"""csrc/host/cuda_driver.h has the driver's types as cuda.h has them."""

import subprocess
from pathlib import Path

import pytest
from compilers import cxx
from device_compilers import find_cuda_headers
from source_tree import replace_once

HERE = Path(__file__).parent
HEADER = HERE.parents[1] / "csrc/host/cuda_driver.h"


def compiled(header, tmp_path):
    """Whether the comparison of a header with cuda.h compiles, and what the compiler says."""
    compiler, headers = cxx(), find_cuda_headers()
    if headers is None:
        pytest.skip("cuda.h is not there")
    if int((headers / "cuda.h").read_text().split("#define CUDA_VERSION ")[1].split()[0]) < 12030:
        pytest.skip("cuda.h is older than CUDA 12.3")
    (tmp_path / "cuda_driver.h").write_text(header)
    command = [compiler, "-std=c++20", "-Wall", "-Werror", "-fsyntax-only"]
    command += [
        "-isystem",
        headers,
        f"-I{tmp_path}",
        HERE.parent / "linking/compare_cuda_driver.cpp",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode == 0, done.stderr


def test_it_has_the_layouts_and_values_of_cuda_h(tmp_path):
    is_right, said = compiled(HEADER.read_text(), tmp_path)
    assert is_right, said


# What is there, what takes its place, and the comparison that must fail.
CHANGES = [
    (
        "kStreamSerialization = 6",
        "kStreamSerialization = 7",
        "static_assert(driver::kStreamSerialization ==",
    ),
    (
        "uint64_t kernel, context;",
        "uint64_t context, kernel;",
        "KCCL_SAME_PLACE(KernelNode, kernel,",
    ),
    ("alignas(8) int id;", "int id;", "static_assert(alignof(Attribute) =="),
    ("char rest[60];", "char rest[52];", "static_assert(sizeof(Attribute) =="),
    (
        "uint64_t stream;\n    LaunchAttribute*",
        "LaunchAttribute*",
        "KCCL_SAME_PLACE(Config, stream,",
    ),
    (
        "uint64_t stream, int* status);",
        "int* status, uint64_t stream);",
        "static_assert(Same<driver::IsCapturing,",
    ),
    ("size_t* count);", "size_t* count, int more);", "static_assert(Same<driver::CaptureInfo,"),
    (
        "SetParams = int (*)(uint64_t node,",
        "SetParams = int (*)(int node,",
        "static_assert(Same<driver::SetParams,",
    ),
]


def test_differences_are_seen(tmp_path):
    """All in one header, because reading cuda.h takes longest."""
    text = HEADER.read_text()
    for right, wrong, _ in CHANGES:
        text = replace_once(text, right, wrong, HEADER.name)
    is_right, said = compiled(text, tmp_path)
    assert not is_right
    assert [failed for _, _, failed in CHANGES if failed not in said] == []
