"""A bench on the host backend and on the simulator: kccl and MPI on NumPy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import kccl

from ..harness.collective import Collective, Problem
from ..harness.measure import Contender, Row, add_floors, kccl_contenders, merge
from ..peers import baselines, mpi


class HostSide:
    """The contenders, floors, peers and notes of a run on the host or on the simulator.

    Attributes:
        machine: Facts about the machine that the document needs besides those of the CPU.
    """

    def __init__(
        self, comm: kccl.Communicator, collective: Collective, *, has_baselines: bool
    ) -> None:
        self.machine: dict[str, Any] = {}
        self._comm = comm
        self._collective = collective
        self._in_job = baselines.InJob(comm) if has_baselines else None
        self._floors = Floors()

    def contenders(self, problem: Problem) -> list[Contender]:
        """Probe the floors; return kccl's contenders and those of this job's MPI. Collective."""
        if self._comm.backend != "sim":
            # At every size, because a machine's latency drifts during a sweep.
            self._floors.one_ways_us.append(kccl.probe.one_way_latency_us(self._comm))
            if problem.nbytes:
                copy_us = kccl.probe.copy_us(self._comm, problem.nbytes)
                self._floors.copies_us[problem.nbytes] = copy_us
        found = kccl_contenders(self._comm, self._collective, problem)
        if self._in_job is not None:
            found += self._in_job.contenders(self._collective, problem)
        return found

    def finish(
        self, rows: Sequence[Row], request: baselines.Request, problem: Problem
    ) -> tuple[list[Row], list[str]]:
        """All rows with their floors, and a note for each peer without rows. Collective.

        Args:
            rows: The rows measured in this job.
            request: What the job of another MPI has to measure.
            problem: One of the measured problems.
        """
        found, notes = list(rows), []
        if self._in_job is not None:
            notes = [self._in_job.missing] if self._in_job.missing else []
            unsupported = mpi.unsupported(problem)
            if unsupported:
                notes.append(unsupported)
            elif self._in_job.library != "openmpi":
                peers, missing = baselines.open_mpi_rows(self._comm, request)
                found = merge(found, peers)
                notes += [missing] if missing else []
        if self._comm.backend == "sim":
            # Simulated times give no bandwidth.
            for row in found:
                row["algbw_gbps"] = row["busbw_gbps"] = None
        else:
            self._floors.add(found)
        return found, notes

    def close(self) -> None:
        """Does nothing: there is nothing to release."""


@dataclass
class Floors:
    """The machine's own latencies in microseconds, as probed during a run.

    Attributes:
        one_ways_us: One-way latencies of a cache line, or on GPUs of a word.
        copies_us: Bytes of a message -> time of one copy. A size that is absent counts as 0.
    """

    one_ways_us: list[float] = field(default_factory=list)
    copies_us: dict[int, float] = field(default_factory=dict)

    def add(self, rows: Sequence[Row]) -> None:
        """Sets `floor_us` in the rows of the same run."""
        # A copy of more bytes bounds the copy of fewer.
        copies_us = {
            row["bytes"]: min(
                (us for nbytes, us in self.copies_us.items() if nbytes >= row["bytes"]),
                default=0.0,
            )
            for row in rows
        }
        # Why the minimum: a disturbed probe would raise the floor and make results look too good.
        add_floors(rows, min(self.one_ways_us), copies_us)
