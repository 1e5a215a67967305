"""KCCL in users' builds, on two GPUs: NVRTC, nvcc, CMake, CuPy, PyTorch, C++ with MPI."""

import re
import sys

import pytest
from gpu_vendor import BACKEND
from linked_programs import EXAMPLES, extensions_in, run

WORLD_SIZE = 2
KCCL_RUN = (sys.executable, "-m", "kccl", "run", "-n", str(WORLD_SIZE), "--", sys.executable)
pytestmark = [
    pytest.mark.timeout(300),
    # conftest.py takes the number of GPUs from this name.
    pytest.mark.parametrize("world_size", [WORLD_SIZE]),
]


# `programs` starts the compilers, so that they work while the examples run.
@pytest.mark.parametrize(
    "example",
    [
        *("07_all_reduce_in_a_kernel", "08_fused_rmsnorm", "09_fused_gemv", "10_monokernel_step"),
        "13_experts_in_pytorch",
    ],
)
def test_kernels_by_kccl_compile(world_size, example, programs):
    pytest.importorskip("cupy")
    assert f"2 ranks on {BACKEND}" in run(sys.executable, EXAMPLES / f"{example}.py", BACKEND)


def test_a_raw_kernel_of_cupy(world_size):
    pytest.importorskip("cupy")
    out = run(*KCCL_RUN, EXAMPLES / "gpu" / "cupy_raw_kernel.py")
    assert out.count("1000 elements are 1.5") == world_size


def mpirun(program):
    """Runs a program as two ranks, and returns what it prints."""
    version = run("mpirun", "--version")
    as_root = ("--allow-run-as-root", "--oversubscribe") if "Open MPI" in version else ()
    return run("mpirun", *as_root, "-n", str(WORLD_SIZE), program)


@pytest.mark.parametrize("how", ["cmake", "nvcc"])
def test_a_program_without_python(world_size, how, programs):
    """Built with CMake's find_package(kccl), and with nvcc and the include folder alone."""
    said = mpirun(programs[how].result())
    assert said.startswith("2 ranks, 4 blocks, 1000 rounds: right")


def test_a_program_without_python_learns_why_a_call_failed(world_size, programs):
    said = mpirun(programs["late"].result())
    late, thrown, *others = sorted(
        line for line in said.splitlines() if line.startswith("rank 0: ")
    )
    assert others == []
    # The epoch seen is that of the last call with the same parity.
    assert re.fullmatch(
        r"rank 0: all_reduce_one_shot_ll16 on channel 0: peer 1 did not arrive; rank 0 waited for "
        r"peer 1: epoch seen 9, wanted 11, after 0\.5\d* s; all ranks may go on with a new "
        r"Communicator",
        late,
    )
    assert thrown.startswith("rank 0: rank 1 gave up outside of a call: an exception ended its ")


def test_a_pytorch_extension(world_size, programs):
    pytest.importorskip("torch")
    environment = extensions_in(programs["torch"].result())
    out = run(sys.executable, EXAMPLES / "gpu" / "torch_extension.py", env=environment)
    assert out.count("1000 elements are 1.5") == world_size
