"""The programs that test_gpu_linking.py runs, built by users' tools."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from source_tree import ROOT

import kccl

EXAMPLES = ROOT / "examples"
# Where the driver's library may lie, which programs without Python link against.
DRIVER_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/usr/local/cuda/lib64/stubs",
    "/usr/lib64",
)


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"there is no {name}")
    return path


def start(pool, new_folder):
    """Lets a pool build all programs in parallel, because building takes most of the tests' time.

    Args:
        pool: Its workers wait for compilers.
        new_folder: name -> an empty folder.

    Returns:
        Name -> the future of what was built. If a tool is missing, its result() skips the test.
    """
    return {
        name: pool.submit(call, *arguments, new_folder(name))
        for name, (call, *arguments) in {
            # The longest first.
            "torch": (build_by_torch,),
            "cmake": (build_by_cmake,),
            "nvcc": (build, EXAMPLES / "cpp" / "all_reduce_mpi.cu"),
            "late": (build, ROOT / "tests" / "linking" / "late_on_gpus.cu"),
        }.items()
    }


def build_by_torch(folder):
    """Builds with torch.utils.cpp_extension; the example finds the build in this folder."""
    tool("nvcc"), tool("ninja")
    program = "import torch_extension; torch_extension.build()"
    run(sys.executable, "-c", program, cwd=EXAMPLES / "gpu", env=extensions_in(folder))
    return folder


def extensions_in(folder):
    return os.environ | {"TORCH_EXTENSIONS_DIR": str(folder)}


def mpi_flags():
    """The flags that Open MPI's or MPICH's compiler adds."""
    for option in ("--showme", "-show"):
        done = subprocess.run([tool("mpicxx"), option], capture_output=True, text=True)
        if done.returncode == 0:
            return done.stdout.split()[1:]
    raise AssertionError(done.stderr)


def libcuda():
    for folder in map(Path, DRIVER_FOLDERS):
        for name in ("libcuda.so", "libcuda.so.1"):
            if (folder / name).exists():
                return folder / name
    found = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    paths = [line.split()[-1] for line in found.splitlines() if "libcuda.so" in line]
    assert paths, "there is a GPU, and no libcuda"
    return Path(paths[0])


def build_by_cmake(folder):
    flags = [f"-Dkccl_DIR={kccl.cmake_dir()}", f"-DCMAKE_CUDA_COMPILER={tool('nvcc')}"]
    flags += [f"-DMPI_CXX_COMPILER={tool('mpicxx')}", f"-DCUDA_cuda_driver_LIBRARY={libcuda()}"]
    run(tool("cmake"), "-S", EXAMPLES / "cpp", "-B", folder, *flags)
    run(tool("cmake"), "--build", folder)
    return folder / "all_reduce_mpi"


def build(source, folder):
    """Builds with nvcc, without CMake."""
    flags = mpi_flags()
    # nvcc takes no -Wl and no -pthread itself.
    host = [flag for flag in flags if flag.startswith(("-I", "-L", "-l"))]
    rpaths = [f"-Xlinker=-rpath,{flag[2:]}" for flag in host if flag.startswith("-L")]
    compile_it = [tool("nvcc"), "-std=c++20", "-arch=native", f"-I{kccl.include_dir()}", source]
    run(*compile_it, *host, *rpaths, libcuda(), "-o", folder / source.stem)
    return folder / source.stem
