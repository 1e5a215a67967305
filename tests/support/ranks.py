"""Runs programs as ranks under `kccl run`, and finds what they leave behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path

LAUNCHER = [sys.executable, "-m", "kccl", "run"]
_JOB = "RANKS_OF_A_TEST"
# Seconds. What must happen at once may take so long, because the machine may be busy with other
# things. A time-out that must not end a wait is at least twice as long.
AT_ONCE = 10

PRELUDE = """
import json, os, signal, sys, threading, time
import kccl

def say(**facts):
    os.write(1, (json.dumps(facts) + "\\n").encode())
"""


def whole(program):
    """A rank's program with what the programs of all tests use: the PRELUDE, and NumPy if it is
    used, whose import is a third of a rank's start.
    """
    return PRELUDE + ("import numpy as np\n" if re.search(r"\bnp\.", program) else "") + program


def environment(**variables):
    """This process's environment without a launcher's variables, and with `variables`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if (not name.startswith(("KCCL_", "PMI", "OMPI", "MPI", "SLURM_")) or name == "KCCL_CACHE")
        and name not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    return kept | {"KCCL_TIMEOUT": "20", "KCCL_FIRST_TIMEOUT": "20"} | variables


class Job:
    """A launcher that has been started, and its ranks."""

    def __init__(self, world_size, program, *options, **variables):
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [
                *LAUNCHER, "-n", str(world_size), *options,
                "--", sys.executable, "-c", whole(program),
            ],
            env=environment(**variables) | {_JOB: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        # Several times, because a process between fork and exec does not show its mark.
        eventually(self._has_no_more)
        self.process.communicate()

    def _has_no_more(self):
        pids = self.pids()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    def end(self, timeout=60):
        """Exit code, what ranks said, by rank, and stderr."""
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, {fact["rank"]: fact for fact in facts(out)}, err

    def wait_for(self, num_lines):
        """The next lines of standard output."""
        return [json.loads(self.process.stdout.readline()) for _ in range(num_lines)]

    def pids(self):
        """Ids of the job's processes, launcher and guard included."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                environ = (folder / "environ").read_bytes()
                if f"{_JOB}={self.mark}".encode() in environ.split(b"\0"):
                    found.append(int(folder.name))
        return found

    def rank_pids(self):
        """Rank -> process id."""
        found = {}
        for pid in self.pids():
            with suppress(OSError):
                for text in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    name, _, value = text.partition(b"=")
                    if name == b"KCCL_RANK":
                        found[int(value)] = pid
        return found


def start(program, **variables):
    """Starts a process that the variables make a rank."""
    return subprocess.Popen(
        [sys.executable, "-c", whole(program)],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(world_size, program, *options, timeout=60, **variables):
    """Runs a job to its end: exit code, what ranks said, by rank, and stderr."""
    with Job(world_size, program, *options, **variables) as job:
        return job.end(timeout)


def facts(out):
    """What ranks said, from the lines of a standard output."""
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def traces(pids):
    """Names of sockets and of shared memory that these processes have left in the kernel.

    Sockets of other processes do not count, because tests run in parallel.
    """
    marks = tuple(f"@kccl-{pid}-" for pid in pids)
    names = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()}
    shared = {path.name for path in Path("/dev/shm").glob("*kccl*")}
    return shared | {name for name in names if name.startswith(marks)}


def eventually(condition, limit_s=5.0):
    """True as soon as `condition()` holds."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return bool(condition())
