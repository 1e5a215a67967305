"""Ranks that are processes on the hip backend: windows between them, and a rank that dies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hip_runtime
import pytest
import ranks

HERE = Path(__file__).parent
PRELUDE = """
import os, signal
import hip_runtime
hip_runtime.quicken()
from hip_arrays import from_gpu, ordinal_of, to_gpu
"""


@pytest.fixture
def job():
    """job(program, world_size=2, **variables): what the ranks said, by rank."""
    pytest.importorskip("hip", reason="hip-python is not installed")

    def run(program, world_size=2, *, code=0, **variables):
        folders = [str(HERE), str(HERE.parent / "support"), str(HERE.parent / "sim")]
        path = os.pathsep.join([*folders, *filter(None, [os.environ.get("PYTHONPATH")])])
        variables |= {"PYTHONPATH": path, **hip_runtime.environment()}
        found, facts, err = ranks.run(world_size, PRELUDE + program, timeout=100, **variables)
        assert found == code, err
        return facts, err

    return run


# Before ROCm 7.1 file descriptors are not imported.
WAYS = {"vmm": {"KCCL_WINDOWS": "vmm"}, "ipc": {"HIP_RUNTIME_VERSION": "70051831"}}


# test_hip_collectives.py has every number of ranks.
@pytest.mark.long
@pytest.mark.parametrize(("way", "world_size"), [("vmm", 4), ("ipc", 2)])
def test_bits_are_the_oracles(job, kernels_are_warm, way, world_size):
    facts, err = job("""
from hip_matrix import call_all
from programs import OF_DATA
comm = kccl.init("hip")
wrong = call_all(comm, OF_DATA)
comm.close()
say(rank=comm.rank, wrong=wrong)
""", world_size, **WAYS[way])  # fmt: skip
    assert [facts[rank]["wrong"] for rank in range(world_size)] == [[]] * world_size, err


def test_a_rank_that_dies_is_named(job):
    facts, _ = job("""
comm = kccl.init("hip")
ordinal = ordinal_of(comm)
x = to_gpu(np.ones(8, np.float32), ordinal)
comm.all_reduce(x)
kccl.gpu.synchronize(kccl.gpu.device(ordinal))
comm.check()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.all_reduce(x)
kccl.gpu.synchronize(kccl.gpu.device(ordinal))
error = None
try:
    comm.check()
except kccl.PeerLost as caught:
    error = str(caught)
alone = comm.shrink()
x = to_gpu(np.ones(8, np.float32), ordinal)
alone.all_reduce(x)
alone.check()
say(rank=comm.rank, error=error, size=alone.world_size, x=float(from_gpu(x)[0]))
""", code=137)  # fmt: skip
    assert "the process of peer 1 has ended" in facts[0]["error"]
    assert (facts[0]["size"], facts[0]["x"]) == (1, 1)


@pytest.mark.long
def test_the_bench_runs_on_the_backend():
    pytest.importorskip("hip", reason="hip-python is not installed")
    command = ["kccl", "bench", "all_reduce", "--backend", "hip", "-b", "8", "-e", "8", "--json"]
    command += ["--iterations", "2", "--repeats", "1", "-d", "float32"]
    done = subprocess.run(
        [*ranks.LAUNCHER, "-n", "2", "--", sys.executable, "-m", *command],
        env=ranks.environment(HIP_RUNTIME_UNCHECKED="1", **hip_runtime.environment()),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["machine"]["gpus"] == ["simulated MI300X"] * 2
    rows = document["rows"]
    assert {(row["library"], row["wrong"]) for row in rows} == {("kccl", 0)}
