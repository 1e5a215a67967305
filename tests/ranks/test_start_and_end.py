"""Ranks that end before kccl.init(), or by an exception: the others hear of it at once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import PRELUDE, environment, facts, run

MPIRUN = Path(sys.executable).with_name("mpirun")

BEFORE_INIT = """
rank = int(os.environ["KCCL_RANK"])
if rank == VICTIM:
    time.sleep(SECONDS)
    sys.exit(CODE)
started = time.monotonic()
try:
    kccl.init()
except kccl.PeerLost as error:
    say(rank=rank, peer=error.peer, seconds=time.monotonic() - started, message=str(error))
"""


@pytest.mark.parametrize("seconds", [0, 0.7])
@pytest.mark.parametrize(("victim", "code"), [(0, 3), (1, 0), (2, 5)])
def test_a_rank_ends_before_init(victim, code, seconds):
    program = BEFORE_INIT.replace("VICTIM", str(victim)).replace("CODE", str(code))
    returned, said, err = run(3, program.replace("SECONDS", str(seconds)))
    assert returned == code, err
    assert sorted(said) == sorted({0, 1, 2} - {victim})
    for rank, fact in said.items():
        assert fact["peer"] == victim, fact
        assert fact["seconds"] < 5
        assert fact["message"] == (
            f"rank {rank} lost rank {victim} at start-up: it ended before its kccl.init()"
        )


def mpirun(world_size, program, **variables):
    """Exit code, what ranks said, and stderr."""
    if not MPIRUN.exists():
        pytest.skip("no mpirun beside this Python")
    command = [MPIRUN, "-n", str(world_size), sys.executable, "-c", PRELUDE + program]
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=60
    )
    return done.returncode, {fact["rank"]: fact for fact in facts(done.stdout)}, done.stderr


def test_a_rank_does_not_come_under_mpirun():
    """KCCL_FIRST_TIMEOUT limits the wait for it; MPI's own calls have no limit."""
    program = """
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
if rank == 1:
    time.sleep(6)
    os._exit(0)
started = time.monotonic()
try:
    kccl.init()
except kccl.Timeout as error:
    say(rank=rank, seconds=time.monotonic() - started, message=str(error))
time.sleep(max(0, started + 6 - time.monotonic()))
os._exit(0)
"""
    _, said, err = mpirun(3, program, KCCL_FIRST_TIMEOUT="1")
    assert sorted(said) == [0, 2], err
    for fact in said.values():
        assert 0.9 < fact["seconds"] < 4
        assert "KCCL_FIRST_TIMEOUT is the limit" in fact["message"]


def test_a_rank_comes_too_late_under_mpirun():
    """The others have timed out, and make no more calls of MPI."""
    program = """
from mpi4py import MPI
rank = MPI.COMM_WORLD.Get_rank()
threading.Timer(9, os._exit, [7]).start()
started = time.monotonic()
if rank == 1:
    time.sleep(1.5)
try:
    kccl.init()
except kccl.Timeout as error:
    say(rank=rank, seconds=time.monotonic() - started, message=str(error))
time.sleep(max(0, started + 4 - time.monotonic()))
os._exit(0)
"""
    _, said, err = mpirun(2, program, KCCL_FIRST_TIMEOUT="1")
    assert sorted(said) == [0, 1], err
    assert 2.4 < said[1]["seconds"] < 7
    assert "KCCL_FIRST_TIMEOUT is the limit" in said[1]["message"]


def test_local_ranks_under_mpirun():
    program = """
comm = kccl.init()
say(rank=comm.rank, local_rank=comm.local_rank, launcher=comm.launcher)
"""
    _, said, err = mpirun(3, program)
    assert said == {r: {"rank": r, "local_rank": r, "launcher": "mpi"} for r in range(3)}, err


@pytest.mark.parametrize("which", ["comm", "part"])
@pytest.mark.parametrize("end", ["raise RuntimeError('mishap')", "sys.exit(0)"])
def test_a_rank_ends_under_mpirun(end, which):
    """It sits in MPI_Finalize then. Calls on the communicator, or on a part of it, fail."""
    program = f"""
comm = kccl.init()
part = comm.split(0)
comm.barrier()
part.barrier()
if comm.rank == 1:
    {end}
started = time.monotonic()
try:
    {which}.barrier()
except kccl.PeerLost as error:
    say(rank=comm.rank, seconds=time.monotonic() - started, message=str(error))
# The other one may still be about to see who ended first.
time.sleep(0.5)
"""
    _, said, err = mpirun(3, program)
    assert sorted(said) == [0, 2], err
    for fact in said.values():
        assert fact["seconds"] < 5
        assert re.search("(rank 1 gave up|peer 1 has closed)", fact["message"])
    assert ("RuntimeError: mishap" in err) == ("mishap" in end)
