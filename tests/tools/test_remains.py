"""Ranks that have ended and that the kernel keeps."""

import re
import subprocess
import sys

import pytest
from ranks import PRELUDE, environment

from kccl.tools.remains import Remains, Thread, remains_of

# The launcher is a thread's tracer, and as such must wait for it, which it never does: as when a
# driver holds the thread, the process cannot be waited for when it has ended.
KEPT = """
import ctypes
is_traced = threading.Event()
def be_traced():
    TRACEME = 0
    say(traced=ctypes.CDLL(None).ptrace(TRACEME, 0, 0, 0) == 0)
    is_traced.set()
    time.sleep(60)
if os.environ["KCCL_RANK"] == "1":
    threading.Thread(target=be_traced, daemon=True).start()
    is_traced.wait()
    os._exit(3)
"""
# The first thread ends, another one goes on.
HEADLESS = """
import ctypes
threading.Thread(target=lambda: (time.sleep(3), say(rank=0), os._exit(4))).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def launch(world_size, program, change=""):
    """As `kccl run`, with shorter limits, and a change of the launcher's process."""
    launcher = (
        "import os, sys; from kccl.tools import run as launch; launch._LOOK_S, launch._ENDING_S = 0.1, 1\n"
        f"{change}\n"
        f"sys.exit(launch.run([sys.executable, '-c', sys.argv[1]], {world_size}))"
    )
    return subprocess.run(
        [sys.executable, "-c", launcher, PRELUDE + program],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_rank_that_the_kernel_keeps_is_not_waited_for():
    done = launch(2, KEPT)
    if '"traced": false' in done.stdout:
        pytest.skip("this machine forbids ptrace")
    assert done.returncode == 3
    kept, ended = done.stderr.splitlines()
    assert re.fullmatch(
        r"kccl: rank 1 has ended and is not waited for: the kernel keeps its thread '.*' \(state "
        r"Z, in \S+\)",
        kept,
    )
    assert ended == "kccl: rank 1 ended with exit code 3"


def test_a_process_whose_first_thread_ends_is_waited_for():
    done = launch(1, HEADLESS)
    assert (done.returncode, done.stdout) == (4, '{"rank": 0}\n')
    assert done.stderr == "kccl: rank 0 ended with exit code 4\n"


def test_a_rank_whose_end_is_not_told_is_seen():
    """As where the kernel's word of it is lost."""
    never_ready = "os.pidfd_open = lambda pid: os.eventfd(0)"
    done = launch(2, "sys.exit(int(os.environ['KCCL_RANK']))", never_ready)
    assert (done.returncode, done.stderr) == (1, "kccl: rank 1 ended with exit code 1\n")


def test_a_ranks_name_may_be_any_bytes():
    """The kernel cuts it after 15, also within a letter."""
    program = """
import ctypes
PR_SET_NAME = 15
ctypes.CDLL(None).prctl(PR_SET_NAME, "программа".encode(), 0, 0, 0)
time.sleep(0.5)
say(rank=0)
"""
    done = launch(1, program)
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"rank": 0}\n', "")


# A proc(5) that is made up

RUNS, EXITING, PID = 0x400000, 0x400004, 70


def task(folder, state, flags, status=0, comm=b"python3", wchan="nvidia_close"):
    folder.mkdir(parents=True, exist_ok=True)
    fields = [state, *"12345", str(flags), *["0"] * 42, str(status)]
    (folder / "stat").write_bytes(b"70 (" + comm + b") " + " ".join(fields).encode() + b"\n")
    (folder / "comm").write_bytes(comm + b"\n")
    if wchan:
        (folder / "wchan").write_text(wchan)


def process(proc, state, flags, status=0, **others):
    task(proc / str(PID), state, flags, status)
    task(proc / f"{PID}/task/{PID}", state, flags, status, **others)


def test_a_thread_of_whatever_name_is_told_with_its_place(tmp_path):
    process(tmp_path, "Z", EXITING, 3 << 8)
    task(tmp_path / f"{PID}/task/71", "D", EXITING, comm="программа".encode()[:15])
    task(tmp_path / f"{PID}/task/72", "Z", EXITING, wchan="")
    assert remains_of(PID, tmp_path) == Remains(
        3 << 8,
        [Thread("програм\ufffd", "D", "nvidia_close"), Thread("python3", "Z", "?")],
    )
    text = str(Thread("cuda", "D", "nvidia_close"))
    assert text == "its thread 'cuda' (state D, in nvidia_close)"


def test_the_first_thread_may_be_the_one_that_is_kept(tmp_path):
    process(tmp_path, "D", EXITING, 0)
    assert remains_of(PID, tmp_path) == Remains(0, [Thread("python3", "D", "nvidia_close")])


@pytest.mark.parametrize("state", ["Z", "S"])
def test_nothing_is_left_while_a_thread_runs(state, tmp_path):
    process(tmp_path, state, EXITING)
    task(tmp_path / f"{PID}/task/71", "S", RUNS)
    assert remains_of(PID, tmp_path) is None


def test_nothing_is_left_of_what_its_parent_can_wait_for(tmp_path):
    process(tmp_path, "Z", EXITING)
    assert remains_of(PID, tmp_path) is None


def test_nothing_is_known_of_what_is_not_shown(tmp_path):
    assert remains_of(PID, tmp_path) is None
    process(tmp_path, "S", RUNS)
    assert remains_of(PID, tmp_path) is None
    (tmp_path / f"{PID}/stat").write_text("70 (short) S 1")
    assert remains_of(PID, tmp_path) is None
    process(tmp_path, "S", RUNS)
    (tmp_path / f"{PID}/task/{PID}/stat").unlink()
    assert remains_of(PID, tmp_path) is None
