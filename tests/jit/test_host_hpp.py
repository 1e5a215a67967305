"""csrc/include/kccl/host.hpp between processes of MPI, with a fake CUDA driver in host memory.

The program is C++ without Python. The fake driver is linking/fake_cuda.cpp, and the library's calls
run on the CPU. hardware/test_gpu_linking.py runs host.hpp on GPUs, and
csrc/test_record_words.py reads all its sentences about failures.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from compilers import cxx
from device_compilers import find_cuda_headers

import kccl

HERE = Path(__file__).parents[1] / "linking"
WORLD_SIZE = 3
BIN = Path(sys.executable).parent
FLAGS = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror")
pytestmark = pytest.mark.skipif(
    find_cuda_headers() is None, reason="cuda.h is not there: no toolkit, no nvidia-cuda-runtime"
)


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The path of the program. The fake driver lies beside it."""
    compiler = cxx()
    mpi = shutil.which("mpicxx", path=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    if mpi is None:
        pytest.skip("no mpicxx: pip install mpich")
    if " " in mpi:
        pytest.skip("mpicxx is a script of the shell that splits its own folder at blanks")
    folder = tmp_path_factory.mktemp("linking")
    includes = [f"-I{kccl.include_dir()}", "-isystem", find_cuda_headers()]
    driver = [compiler, *FLAGS, *includes, "-shared", "-fPIC", HERE / "fake_cuda.cpp"]
    subprocess.run([*driver, "-o", folder / "libcuda.so"], check=True)
    ranks = [mpi, f"-cxx={compiler}", *FLAGS, *includes, HERE / "ranks_on_cpus.cpp"]
    link = ["-o", folder / "ranks", f"-L{folder}", "-lcuda", f"-Wl,-rpath,{folder}"]
    subprocess.run([*ranks, *link], check=True)
    return folder / "ranks"


def told(program, part, **environment):
    """What each rank printed, in rank order."""
    command = [BIN / "mpirun", "-n", str(WORLD_SIZE), program, part]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "leaked" not in done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line.partition(":")[0] for line in lines] == [f"rank {k}" for k in range(WORLD_SIZE)]
    return [line.partition(": ")[2] for line in lines]


def test_ranks_add_on_every_channel(program):
    assert told(program, "sum") == ["right"] * WORLD_SIZE


def test_a_late_rank_is_named_with_the_call(program):
    first, late, last = told(program, "late")
    assert late == "came late"
    for sentence in (first, last):
        assert re.search(
            r"^all_reduce_one_shot_ll16 on channel 0: peer 1 did not arrive; rank [02] waited for "
            r"peer 1: epoch seen 0, wanted 1, after 0\.5\d* s.*; all ranks may go on with a new "
            r"Communicator$",
            sentence,
        )


def test_a_message_too_long_is_refused_on_all_ranks(program):
    for rank, sentence in enumerate(told(program, "long")):
        assert sentence == (
            f"all_reduce_one_shot_ll16: a call in the kernel on rank {rank} has 1200 bytes, must "
            "have at most 1024, the max_bytes of its Options; all ranks may go on with a new "
            "Communicator"
        )


def test_an_exception_on_one_rank_ends_the_others_waits(program):
    said = told(program, "throw")
    assert said.pop(1) == "on purpose"
    for sentence in said:
        assert sentence.startswith("rank 1 gave up outside of a call: an exception ended its ")


def test_arguments_that_differ_are_an_error_on_every_rank(program):
    said = told(program, "differ")
    assert said == ["max_bytes is 1000 on rank 0 and 1001 on rank 1"] * WORLD_SIZE


def test_a_window_is_mapped_by_all_ranks(program):
    assert told(program, "window") == ["right"] * WORLD_SIZE


def test_wrong_arguments_are_errors_on_every_rank(program):
    said = "num_bytes is 0, must be positive"
    assert told(program, "empty") == [said] * WORLD_SIZE
    said = "rank 3 of 3: there can be 8 ranks, from 0"
    assert told(program, "number") == [said] * WORLD_SIZE


@pytest.mark.parametrize(
    "function",
    [
        "cuInit",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemAlloc",
        "cuMemHostAlloc",
    ],
)
def test_an_error_of_the_driver_on_one_rank_is_thrown_on_all(program, function):
    for sentence in told(program, "sum", FAKE_CUDA_FAILS=f"{function}:2"):
        assert sentence.startswith(f"{function} failed: CUDA_ERROR_OUT_OF_MEMORY (2) on rank 2")


def test_a_rank_without_a_device_is_named(program):
    for sentence in told(program, "sum", FAKE_CUDA_FAILS="cuCtxGetCurrent:0"):
        assert sentence == "rank 0 has no current device: cudaSetDevice()"
