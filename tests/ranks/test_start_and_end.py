"""Ranks that end before kccl.init(), or by an exception: the others hear of it at once."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from long import long_after, long_beyond_each
from ranks import AT_ONCE, environment, facts, run, whole

import kccl
from kccl.ranks import siblings

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


@pytest.mark.parametrize("seconds", long_after(1, [0, 0.7]))
@pytest.mark.parametrize(("victim", "code"), long_after(2, [(0, 3), (1, 0), (2, 5)]))
def test_a_rank_ends_before_init(victim, code, seconds):
    program = BEFORE_INIT.replace("VICTIM", str(victim)).replace("CODE", str(code))
    returned, said, err = run(3, program.replace("SECONDS", str(seconds)))
    assert returned == code, err
    assert sorted(said) == sorted({0, 1, 2} - {victim})
    for rank, fact in said.items():
        assert fact["peer"] == victim, fact
        assert fact["seconds"] < AT_ONCE
        assert fact["message"] == (
            f"rank {rank} lost rank {victim} at start-up: it ended before its kccl.init(), or "
            "could not start: what it has printed says why"
        )


TORCHRUN = """
rank = int(os.environ["RANK"])
if rank == 1:
    time.sleep(1)
    sys.exit(0)
try:
    kccl.init()
except kccl.PeerLost as error:
    say(rank=rank, peer=error.peer, message=str(error))
"""


@pytest.mark.long
def test_a_rank_ends_with_0_before_init_under_torchrun(tmp_path):
    """torchrun ends the others of a rank that fails, and lets them wait for this one."""
    torchrun = Path(sys.executable).with_name("torchrun")
    if not torchrun.exists():
        pytest.skip("no torchrun beside this Python")
    program = tmp_path / "program.py"
    program.write_text(whole(TORCHRUN))
    command = [torchrun, "--standalone", "--nproc-per-node", "3", program]
    done = subprocess.run(
        command,
        env=environment(KCCL_FIRST_TIMEOUT="50"),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    said = {fact["rank"]: fact for fact in facts(done.stdout)}
    assert sorted(said) == [0, 2]
    for rank, fact in said.items():
        assert fact["peer"] == 1
        assert f"rank {rank} lost rank 1 at start-up: it ended before" in fact["message"]


def mpirun(world_size, program, **variables):
    """Exit code, what ranks said, and stderr."""
    if not MPIRUN.exists():
        pytest.skip("no mpirun beside this Python")
    command = [MPIRUN, "-n", str(world_size), sys.executable, "-c", whole(program)]
    done = subprocess.run(
        command, env=environment(**variables), capture_output=True, text=True, timeout=60
    )
    return done.returncode, {fact["rank"]: fact for fact in facts(done.stdout)}, done.stderr


@pytest.mark.long
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


def test_a_rank_that_never_enters_mpi_init_ends_the_wait_of_the_others():
    """A rank that is in MPI_Init cannot raise, so its guard ends it."""
    program = """
if os.environ["PMI_RANK"] == "1":
    time.sleep(50)
kccl.init()
"""
    began = time.monotonic()
    code, _, err = mpirun(2, program, KCCL_FIRST_TIMEOUT="1")
    assert code != 0 and time.monotonic() - began < 40
    assert "kccl: rank 0 waited too long for the other ranks at start-up" in err
    assert "fails between its `from mpi4py import MPI` and its `import kccl`" in err


def test_the_wait_for_processes_that_a_launcher_has_not_started_ends(monkeypatch):
    found = siblings.Siblings("SOME_RANK", 0, 3, is_one_machine=True)
    monkeypatch.setattr(found, "_launcher", os.getppid())
    # A child of the launcher that does not show its rank, as one of another user.
    monkeypatch.setattr(found, "_look", lambda: False)
    with pytest.raises(kccl.Timeout, match="waited too long for rank 1"), found.guarding(0.2):
        raise AssertionError


def test_all_raise_why_one_rank_cannot_start_under_mpirun():
    program = """
rank = int(os.environ["PMI_RANK"])
if rank == 1:
    os.environ["KCCL_TIMEOUT"] = "soon"
try:
    kccl.init()
except kccl.InvalidArgument as error:
    say(rank=rank, message=str(error))
"""
    code, said, err = mpirun(3, program)
    assert code == 0 and sorted(said) == [0, 1, 2], err
    for fact in said.values():
        assert "KCCL_TIMEOUT='soon' must be a number" in fact["message"]
        assert ("start-up failed on rank 1: " in fact["message"]) == (fact["rank"] != 1)


@pytest.mark.long
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
    assert "fails between its `from mpi4py import MPI`" in said[1]["message"]


ENDS_BEFORE_INIT = """
started = time.monotonic()
rank = int(os.environ["PMI_RANK"])
BEFORE
if rank == VICTIM:
    time.sleep(SECONDS)
    END
try:
    kccl.init()
except kccl.PeerLost as error:
    say(rank=rank, peer=error.peer, seconds=time.monotonic() - started, message=str(error))
"""
ENDS = ["raise RuntimeError('mishap')", "sys.exit(0)", "os._exit(3)"]


@pytest.mark.long
@pytest.mark.parametrize("end", long_after(1, ENDS))
@pytest.mark.parametrize("before", long_after(1, ["", "from mpi4py import MPI"]))
def test_a_rank_ends_before_init_under_mpirun(before, end):
    """A rank ends while the others wait for it in MPI_Init, or while it waits in MPI_Finalize."""
    program = ENDS_BEFORE_INIT.replace("BEFORE", before).replace("END", end)
    program = program.replace("VICTIM", "1").replace("SECONDS", "0.2")
    code, said, err = mpirun(3, program, KCCL_FIRST_TIMEOUT="50")
    assert ("RuntimeError: mishap" in err) == ("mishap" in end)
    if before and end == "os._exit(3)":
        # MPICH ends the job itself.
        assert code != 0
        return
    for fact in said.values():
        assert fact["peer"] == 1 and fact["seconds"] < 20
        assert "lost rank 1 at start-up: it ended before its kccl.init()" in fact["message"]
    # A rank that is in MPI_Init already cannot raise, and ends.
    ended = {0, 2} - set(said)
    assert all(f"kccl: rank {rank} lost rank 1 at start-up" in err for rank in ended) or code == 15


@pytest.mark.long
def test_a_rank_ends_while_the_others_are_in_mpi_init():
    program = ENDS_BEFORE_INIT.replace("BEFORE", "").replace("END", "sys.exit(0)")
    program = program.replace("VICTIM", "0").replace("SECONDS", "5")
    began = time.monotonic()
    code, said, err = mpirun(2, program, KCCL_FIRST_TIMEOUT="50")
    assert time.monotonic() - began < 40
    assert code != 0 and (said or "kccl: rank 1 lost rank 0 at start-up" in err)


@pytest.mark.parametrize(
    ("before", "text"),
    [
        ("from mpi4py import MPI; MPI.Finalize()", "MPI is finalized, .* before MPI.Finalize"),
        ("import mpi4py; mpi4py.rc.initialize = False", "MPI is not initialized, .*MPI.Init"),
    ],
)
def test_mpi_that_cannot_be_called_is_an_error_of_ours(before, text, tmp_path):
    # A rank that ended early would be another error of the other one.
    program = f"""
from pathlib import Path
{before}
rank, folder = int(os.environ["PMI_RANK"]), Path({str(tmp_path)!r})
try:
    kccl.init()
except kccl.BackendError as error:
    say(rank=rank, message=str(error))
(folder / str(rank)).touch()
while not (folder / str(1 - rank)).exists():
    time.sleep(0.01)
"""
    code, said, err = mpirun(2, program)
    assert code == 0 and sorted(said) == [0, 1], err
    for fact in said.values():
        assert re.search(text, fact["message"])


def test_local_ranks_under_mpirun():
    program = """
comm = kccl.init()
say(rank=comm.rank, local_rank=comm.local_rank, launcher=comm.launcher)
"""
    _, said, err = mpirun(3, program)
    assert said == {r: {"rank": r, "local_rank": r, "launcher": "mpi"} for r in range(3)}, err


@pytest.mark.parametrize(
    ("end", "which"),
    long_beyond_each(["raise RuntimeError('mishap')", "sys.exit(0)"], ["comm", "part"]),
)
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
        assert fact["seconds"] < AT_ONCE
        assert re.search("(rank 1 gave up|peer 1 has closed)", fact["message"])
    assert ("RuntimeError: mishap" in err) == ("mishap" in end)


def test_ctrl_c_on_one_rank_is_a_lost_peer_on_the_others():
    class Interrupts:
        def __index__(self):
            raise KeyboardInterrupt

    def main(comm):
        wanted = KeyboardInterrupt if comm.rank == 1 else kccl.PeerLost
        with pytest.raises(wanted) as caught:
            comm.split(0, key=Interrupts() if comm.rank == 1 else 0)
        if comm.rank != 1:
            assert type(caught.value) is kccl.PeerLost and caught.value.peer == 1
            assert str(caught.value) == "split failed on rank 1: KeyboardInterrupt"

    kccl.run_threads(main, 3)
