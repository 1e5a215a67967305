"""What `kccl run` does about signals, and about a parent that ignores some."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from ranks import LAUNCHER, Job, environment, eventually, whole

from kccl.ranks.processes import _state as state

# Each rank says which signals have come, until one ends it.
HEARS = """
rank = int(os.environ["KCCL_RANK"])
for each in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGRTMIN + 2):
    signal.signal(each, lambda number, _: say(rank=rank, heard=number))
signal.signal(signal.SIGQUIT, lambda *_: os._exit(0))
say(rank=rank, pid=os.getpid())
while True:
    signal.pause()
"""


@pytest.mark.parametrize("last", [signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM])
def test_signals_are_passed_on_and_end_the_launcher_cleanly(last):
    with Job(2, HEARS) as job:
        job.wait_for(2)
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1, signal.SIGRTMIN + 2):
            # The guard has the launcher's name, and gets what is sent to all of that name.
            for pid in set(job.pids()) - set(job.rank_pids().values()):
                os.kill(pid, number)
            assert [fact["heard"] for fact in job.wait_for(2)] == [number] * 2
        job.process.send_signal(last)
        code, _, err = job.end()
    if last == signal.SIGQUIT:
        assert (code, err) == (0, "")
    else:
        assert code == 128 + last
        assert err.count(f"was ended by {last.name}") == 2 == len(err.splitlines())


def test_ctrl_z_stops_the_ranks_with_the_launcher():
    """In a session of the tests' own shell: where nobody can continue it, nothing is stopped."""
    command = [*LAUNCHER, "-n", "2", "--timeout", "60", "--", sys.executable, "-c", whole(HEARS)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment(), process_group=0, **options)
    try:
        said = [json.loads(process.stdout.readline()) for _ in range(2)]
        pids = [process.pid, *(fact["pid"] for fact in said)]
        # As the terminal does, and as a shell does for `fg`.
        process.send_signal(signal.SIGTSTP)
        assert eventually(lambda: [state(pid) for pid in pids] == ["T"] * 3)
        process.send_signal(signal.SIGCONT)
        assert eventually(lambda: "T" not in [state(pid) for pid in pids])
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.communicate()


def test_time_in_which_the_launcher_was_stopped_does_not_count():
    command = [*LAUNCHER, "-n", "1", "--timeout", "2", "--", "sh", "-c", "echo; read line"]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    process = subprocess.Popen(command, env=environment(), text=True, **pipes)
    try:
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.2)
        process.send_signal(signal.SIGCONT)
        # It would end the rank now.
        time.sleep(0.3)
        _, err = process.communicate("\n", timeout=30)
        assert (process.returncode, err) == (0, "")
    finally:
        process.kill()


def test_a_parent_that_ignores_the_end_of_children_changes_no_exit_code():
    command = [*LAUNCHER, "-n", "2", "--", sys.executable, "-c", "raise SystemExit(7)"]
    ignores = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); "
    ignores += "os.execv(sys.executable, sys.argv[1:])"
    command = [sys.executable, "-c", ignores, *command]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert sorted(done.stderr.splitlines()) == [
        f"kccl: rank {r} ended with exit code 7" for r in (0, 1)
    ]
