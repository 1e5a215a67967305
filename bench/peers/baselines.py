"""The MPI that started this job as a peer. Open MPI runs in another job: see second_job.py.

No peer is left out silently. For a peer that cannot be measured there is a note with a cure.
"""

from __future__ import annotations

from typing import Any

import kccl

from ..harness.collective import Collective
from ..harness.measure import Contender
from ..harness.problem import Comm, Problem
from . import mpi


class InJob:
    """Makes MPI contenders in this job, which alternate with kccl.

    Attributes:
        missing: Why there are no MPI contenders; None if there are.
        library: The MPI's name in rows; None if there are no MPI contenders.
    """

    def __init__(self, comm: Comm) -> None:
        self.missing: str | None = None
        self.library: str | None = None
        self._mpi: Any = None
        if comm.launcher != "mpi":
            self.missing = (
                "MPICH rows need MPICH's mpirun: mpirun -n 2 kccl bench … --baselines "
                f"({kccl.install_command('mpi')} brings both)"
            )
            return
        try:
            from mpi4py import MPI
        except ImportError as error:
            self.missing = (
                f"no rows of the MPI that started this job: {error}. Cure: "
                + kccl.install_command("mpi")
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
        """Returns MPI's contenders; none if MPI cannot be used or does not support the problem."""
        if self._mpi is None or mpi.unsupported(problem):
            return []
        return mpi.contenders(self._mpi, self._mpi.COMM_WORLD, collective, problem)
