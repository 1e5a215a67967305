"""The contenders, floors and notes of a bench on the host backend or the simulator: kccl and MPI on
NumPy arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import kccl

from ..harness.collective import Collective
from ..harness.measure import Contender, Row, add_floors, kccl_contenders
from ..harness.problem import Problem
from ..peers import mpi
from ..peers.baselines import InJob
from ..peers.second_job import SecondJob
from .places import Places

_FIRST_PROBES = 5


class HostSide:
    """What a run on the host or on the simulator measures: kccl's contenders and those of MPI,
    lower bounds of their times (floors), and notes about peers that could not be measured.

    Attributes:
        machine: Facts about the machine that the document needs besides those of the CPU.
    """

    def __init__(
        self,
        comm: kccl.Communicator,
        collective: Collective,
        *,
        has_baselines: bool,
        places: Places | None = None,
    ) -> None:
        """Makes the object. Collective. `places` also says to which CPUs ranks of another MPI's job
        are pinned; None: they are not pinned.
        """
        self.machine: dict[str, Any] = {}
        self._comm = comm
        self._collective = collective
        self._in_job = InJob(comm) if has_baselines else None
        self._second: SecondJob | None = None
        self._places = places
        self._unsupported: str | None = None
        # There is no floor for simulated times, for times of the scheduler (ranks 0 and 1 share a
        # core), and between nodes, where the network's latency is not measured.
        meets = places is not None and places.first_two_meet
        self._has_floor = comm.backend != "sim" and comm.num_nodes == 1 and not meets
        self._floors = Floors()
        self._before_us = 0.0

    def contenders(self, problem: Problem) -> list[Contender]:
        """Probes the floors. Returns kccl's contenders and those of the MPIs. Collective."""
        if self._has_floor:
            # Probes at every size, because a machine's latency drifts during a sweep. Probes more
            # often at the first size, because its floor is printed before there are other probes.
            for _ in range(0 if self._floors.one_ways_us else _FIRST_PROBES):
                self._floors.one_ways_us.append(kccl.probe.one_way_latency_us(self._comm))
            self._before_us = self._probe(problem)
        found = kccl_contenders(self._comm, self._collective, problem)
        if self._in_job is None:
            return found
        self._unsupported = mpi.unsupported(problem)
        if self._unsupported:
            return found
        found += self._in_job.contenders(self._collective, problem)
        if self._in_job.library != "openmpi":
            if self._second is None:
                self._second = self._start_second()
            found += self._second.contenders(problem)
        return found

    def probe_again(self, problem: Problem) -> None:
        """Probes the floors after a problem has been measured. Collective."""
        if self._has_floor:
            self._floors.around_us[problem.nbytes] = (self._before_us, self._probe(problem))

    def fill(self, rows: Sequence[Row]) -> None:
        """Sets the floors of these rows, if floors were probed. On the simulator it removes their
        bandwidths.
        """
        if self._has_floor:
            self._floors.add(rows)
        if self._comm.backend != "sim":
            return
        # A bandwidth from simulated times would say nothing about a machine.
        for row in rows:
            row["algbw_gbps"] = row["busbw_gbps"] = None

    def notes(self) -> list[str]:
        """Returns a sentence for each peer without rows."""
        found = [self._in_job.missing if self._in_job else None, self._unsupported]
        found.append(self._second.missing if self._second else None)
        return [note for note in found if note]

    def close(self) -> None:
        """Ends the other MPI's job."""
        if self._second is not None:
            self._second.close()

    def _probe(self, problem: Problem) -> float:
        floors = self._floors
        floors.one_ways_us.append(kccl.probe.one_way_latency_us(self._comm))
        if not problem.nbytes:
            return floors.one_ways_us[-1]
        copy_us = kccl.probe.copy_us(self._comm, problem.nbytes)
        floors.copies_us[problem.nbytes] = min(
            copy_us, floors.copies_us.get(problem.nbytes, math.inf)
        )
        return floors.one_ways_us[-1] + copy_us

    def _start_second(self) -> SecondJob:
        if self._places is None:
            return SecondJob(self._comm, [None] * self._comm.world_size)
        return SecondJob(self._comm, self._places.cpus, self._places.lifted())


@dataclass
class Floors:
    """The machine's own latencies in microseconds, which were probed during a run.

    Attributes:
        one_ways_us: One-way latencies of a cache line, or on GPUs of a word.
        copies_us: Bytes of a message -> time of one copy. A size that is absent counts as 0.
        around_us: Bytes of a message -> the floor, probed before that size was measured, and after.
    """

    one_ways_us: list[float] = field(default_factory=list)
    copies_us: dict[int, float] = field(default_factory=dict)
    around_us: dict[int, tuple[float, float]] = field(default_factory=dict)

    def add(self, rows: Sequence[Row]) -> None:
        """Sets the floors of the rows, which must be from the run that has probed the floors."""
        # A copy takes no longer than that of a longer message. So each size gets the least time
        # that was probed at this size or at a larger one.
        copies_us = {
            row["bytes"]: min(
                (us for nbytes, us in self.copies_us.items() if nbytes >= row["bytes"]),
                default=0.0,
            )
            for row in rows
        }
        # Takes the minimum: a disturbed probe would raise the floor and make results look too good.
        add_floors(rows, min(self.one_ways_us), copies_us, self.around_us)
