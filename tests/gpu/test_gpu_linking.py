"""KCCL in other people's builds, on two GPUs: NVRTC, nvcc, CMake, CuPy, PyTorch, C++ with MPI."""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from source_tree import ROOT

import kccl

EXAMPLES = ROOT / "examples"
WORLD_SIZE = 2
KCCL_RUN = (sys.executable, "-m", "kccl.cli", "run", "-n", str(WORLD_SIZE), "--", sys.executable)
# For programs without Python: where the driver's library may lie that is linked against.
DRIVER_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/local/cuda/compat",
    "/usr/local/cuda/lib64/stubs",
    "/usr/lib64",
)
pytestmark = [
    pytest.mark.timeout(300),
    # As conftest.py counts GPUs.
    pytest.mark.parametrize("world_size", [WORLD_SIZE]),
]


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tool(name):
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"there is no {name}")
    return path


# `programs`, so that compilers work while the examples run.
@pytest.mark.parametrize(
    "example",
    ["07_all_reduce_in_a_kernel", "08_fused_rmsnorm", "09_fused_gemv", "10_monokernel_step"],
)
def test_kernels_by_kccl_compile(world_size, example, programs):
    pytest.importorskip("cupy")
    assert "2 ranks on cuda" in run(sys.executable, EXAMPLES / f"{example}.py", "cuda")


def test_a_raw_kernel_of_cupy(world_size):
    pytest.importorskip("cupy")
    out = run(*KCCL_RUN, EXAMPLES / "gpu" / "cupy_raw_kernel.py")
    assert out.count("1000 elements are 1.5") == world_size


def test_a_pytorch_extension(world_size, tmp_path):
    pytest.importorskip("torch")
    tool("nvcc"), tool("ninja")
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    out = run(sys.executable, EXAMPLES / "gpu" / "torch_extension.py", env=environment)
    assert out.count("1000 elements are 1.5") == world_size


def mpi_flags():
    """What Open MPI's or MPICH's compiler adds."""
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


def mpirun(program):
    """Runs it as two ranks, and returns what it says."""
    version = run("mpirun", "--version")
    as_root = ("--allow-run-as-root", "--oversubscribe") if "Open MPI" in version else ()
    return run("mpirun", *as_root, "-n", str(WORLD_SIZE), program)


def build_by_cmake(folder):
    flags = [f"-Dkccl_DIR={kccl.cmake_dir()}", f"-DCMAKE_CUDA_COMPILER={tool('nvcc')}"]
    flags += [f"-DMPI_CXX_COMPILER={tool('mpicxx')}", f"-DCUDA_cuda_driver_LIBRARY={libcuda()}"]
    run(tool("cmake"), "-S", EXAMPLES / "cpp", "-B", folder, *flags)
    run(tool("cmake"), "--build", folder)
    return folder / "all_reduce_mpi"


def build(source, folder):
    """By nvcc, without CMake."""
    flags = mpi_flags()
    # nvcc takes no -Wl and no -pthread itself.
    host = [flag for flag in flags if flag.startswith(("-I", "-L", "-l"))]
    rpaths = [f"-Xlinker=-rpath,{flag[2:]}" for flag in host if flag.startswith("-L")]
    compile_it = [tool("nvcc"), "-std=c++20", "-arch=native", f"-I{kccl.include_dir()}", source]
    run(*compile_it, *host, *rpaths, libcuda(), "-o", folder / source.stem)
    return folder / source.stem


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Futures of what is built, all at the same time: compilers take most of these tests' time."""
    with ThreadPoolExecutor() as pool:
        yield {
            name: pool.submit(call, *arguments, tmp_path_factory.mktemp(name))
            for name, (call, *arguments) in {
                "cmake": (build_by_cmake,),
                "nvcc": (build, EXAMPLES / "cpp" / "all_reduce_mpi.cu"),
                "late": (build, ROOT / "tests" / "linking" / "late_on_gpus.cu"),
            }.items()
        }


@pytest.mark.parametrize("how", ["cmake", "nvcc"])
def test_a_program_without_python(world_size, how, programs):
    """By CMake's find_package(kccl), and by nvcc with the include folder alone."""
    said = mpirun(programs[how].result())
    assert said.startswith("2 ranks, 4 blocks, 1000 rounds: right")


def test_a_program_without_python_hears_why_a_call_failed(world_size, programs):
    said = mpirun(programs["late"].result())
    late, thrown, *others = sorted(
        line for line in said.splitlines() if line.startswith("rank 0: ")
    )
    assert others == []
    # Seen is the last call of this one's parity.
    assert re.fullmatch(
        r"rank 0: all_reduce_one_shot_ll16 on channel 0: peer 1 did not arrive; rank 0 waited for "
        r"it: epoch seen 9, wanted 11, after 0\.5\d* s",
        late,
    )
    assert thrown == "rank 0: rank 1 gave up outside of a call (rank 0 heard it)"
