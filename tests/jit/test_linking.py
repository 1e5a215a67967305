"""KCCL in users' builds: NVRTC, nvcc, CMake. hardware/test_gpu_linking.py runs such builds."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compilers import cxx
from device_compilers import find_cuda_headers, find_nvrtc
from long import long_after
from source_tree import ROOT

import kccl
from kccl.base import abi

EXAMPLES = ROOT / "examples"
GUIDE = ROOT / "csrc/include/kccl/README.md"
# In each of these kernels a block's threads write what its call then sends.
IN_A_KERNEL = {
    "07_all_reduce_in_a_kernel": "descend",
    "09_fused_gemv": "gemv",
    "10_monokernel_step": "decode",
}
WITH_NVRTC = {**IN_A_KERNEL, "08_fused_rmsnorm": "add_and_normalise"}
WITH_NVRTC["11_put_signal_in_a_kernel"] = "spread"
WITH_NVRTC["13_experts_in_pytorch"] = "send_rows"
WITH_NVRTC["gpu/cupy_raw_kernel"] = "scaled_sum"
pytestmark = pytest.mark.takes(20)


def source_of(example):
    """The kernels of an example: the example is read, not run."""
    tree = ast.parse((EXAMPLES / f"{example}.py").read_text())
    (text,) = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SOURCE"
    )
    return text


def tool(name):
    path = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"there is no {name}")
    return path


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def told(command):
    return run(sys.executable, "-m", "kccl", command).strip()


@pytest.mark.skipif(find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed")
# The library itself compiles for other chips in test_device_compile.py.
@pytest.mark.parametrize(
    ("example", "arch"),
    long_after(
        1,
        [
            *((example, "sm_90") for example in WITH_NVRTC),
            *(("10_monokernel_step", other) for other in ("sm_80", "sm_120a")),
        ],
    ),
)
def test_kernels_of_examples_compile_with_nvrtc(example, arch):
    kernel = WITH_NVRTC[example]
    assert kccl.compile(source_of(example), [kernel], target="cuda", arch=arch).names == (kernel,)


@pytest.mark.skipif(find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed")
def test_the_kernel_of_the_guide_compiles():
    (block,) = re.findall(r"```cpp\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    source = "#include <kccl/kccl.cuh>\n" + block
    assert kccl.compile(source, ["mine"], target="cuda", arch="sm_90a").names == ("mine",)


@pytest.mark.long
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_nvcc_needs_the_include_dir_only(tmp_path, arch):
    nvcc = tool("nvcc")
    (tmp_path / "mine.cu").write_text(source_of("gpu/cupy_raw_kernel"))
    command = [nvcc, "-std=c++20", f"-arch={arch}", f"-I{told('include-dir')}", "-cubin"]
    run(*command, "-Werror", "all-warnings", "-o", "mine.cubin", "mine.cu", cwd=tmp_path)
    assert b"scaled_sum" in (tmp_path / "mine.cubin").read_bytes()


@pytest.mark.long
def test_the_guides_nvcc_line_needs_no_python(tmp_path):
    tool("nvcc")
    (line,) = re.findall(r"`(nvcc [^`]+ mine\.cu)`", GUIDE.read_text())
    (tmp_path / "csrc").symlink_to(ROOT / "csrc")
    (tmp_path / "mine.cu").write_text(source_of("07_all_reduce_in_a_kernel"))
    run(*line.split(), cwd=tmp_path)
    assert (tmp_path / "mine.o").is_file()


@pytest.mark.parametrize("example", long_after(1, IN_A_KERNEL))
def test_the_simulator_finds_an_examples_missing_sync(example, tmp_path):
    text = (EXAMPLES / f"{example}.py").read_text()
    assert text.count("block.sync();") == 1
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("block.sync();", ""))
    done = subprocess.run([sys.executable, wrong], capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "ProtocolError" in done.stderr and "race" in done.stderr


# ---- CMake -----------------------------------------------------------------------------------

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(consumer LANGUAGES CXX)
find_package(kccl CONFIG REQUIRED)
find_package(kccl CONFIG REQUIRED)
add_executable(consumer consumer.cpp)
target_link_libraries(consumer PRIVATE kccl::kccl)
"""
CONSUMER = """
#include <kccl/device_comm.h>

#include <cstdio>

int main() {
    constexpr KcclSizes sizes = {3, 1, 32, 0, 64, kKcclLeastStagingBytes, 256};
    constexpr KcclLayout layout = kccl::layout(2, sizes, 4096);
    std::printf("%zu %d %llu", sizeof(kccl::DeviceComm), int{kKcclAbiVersion},
                static_cast<unsigned long long>(layout.scratch_bytes));
}
"""


def configure(folder, source, *arguments):
    run(tool("cmake"), "-S", source, "-B", folder, f"-Dkccl_DIR={told('cmake-dir')}", *arguments)


def test_cmake_finds_the_headers_for_cxx(tmp_path):
    cxx()
    (tmp_path / "CMakeLists.txt").write_text(PROJECT)
    (tmp_path / "consumer.cpp").write_text(CONSUMER)
    configure(tmp_path / "out", tmp_path)
    run(tool("cmake"), "--build", tmp_path / "out")
    size, version, scratch_bytes = map(int, run(tmp_path / "out" / "consumer").split())
    assert (size, version) == (abi.ffi.sizeof("KcclDeviceComm"), abi.ABI_VERSION)
    regions = abi.ffi.new("KcclLayout *")
    sizes = abi.ffi.new("KcclSizes *", [3, 1, 32, 0, 64, abi.LEAST_STAGING_BYTES, 256])
    assert abi.lib.kccl_host_layout(regions, 2, sizes, 4096) == 0
    assert scratch_bytes == regions.scratch_bytes


@pytest.mark.long
@pytest.mark.parametrize("has_driver", [True, False])
def test_cmake_and_nvcc_build_the_example_without_python(tmp_path, has_driver):
    """libcuda comes with the driver, which machines without a GPU lack."""
    nvcc, mpi, compiler = tool("nvcc"), tool("mpicxx"), tool("g++")
    libcuda = tmp_path / "libcuda.so"
    headers = ["-isystem", find_cuda_headers()]
    fake = Path(__file__).parents[1] / "linking" / "fake_cuda.cpp"
    run(compiler, "-std=c++20", *headers, "-shared", "-fPIC", fake, "-o", libcuda)
    configure(
        tmp_path / "out",
        EXAMPLES / "cpp",
        f"-DCMAKE_CUDA_COMPILER={nvcc}",
        f"-DMPI_CXX_COMPILER={mpi}",
        f"-DCUDA_cuda_driver_LIBRARY={libcuda if has_driver else 'NOTFOUND'}",
    )
    run(tool("cmake"), "--build", tmp_path / "out")
    needed = run(tool("readelf"), "-d", tmp_path / "out" / "all_reduce_mpi")
    # Without a driver the program is linked with a library of names, and loads the driver's.
    assert has_driver or ("NEEDED" in needed and "[libcuda.so.1]" in needed)


def test_cmake_refuses_an_unknown_component(tmp_path):
    text = PROJECT.replace("CONFIG REQUIRED)", "CONFIG REQUIRED COMPONENTS gpu)", 1)
    (tmp_path / "CMakeLists.txt").write_text(text)
    with pytest.raises(AssertionError, match="kccl has no component gpu, only cuda_driver"):
        configure(tmp_path / "out", tmp_path)
