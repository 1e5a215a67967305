"""Tells which share of the CPUs programs other than the ranks have had meanwhile; also used by
`kccl topo --probe`, which has no ranks.

The ranks' own threads do not count: a library may have more of them than there are CPUs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

_STAT = Path("/proc/stat")
# The numbers of the fields user, nice, system and steal in a line of /proc/stat. Interrupts are not
# counted, because the ranks' own messages cause some of them.
_FIELDS = (1, 2, 3, 8)


def ran_s(stat: str, cpus: Collection[int]) -> float:
    """Returns the seconds for which some CPUs have run programs since the machine started.

    Args:
        stat: The text of /proc/stat.
        cpus: Numbers of the CPUs.
    """
    names = {f"cpu{cpu}" for cpu in cpus}
    lines = [line.split() for line in stat.splitlines()]
    ticks = sum(
        int(line[field]) for line in lines if line and line[0] in names for field in _FIELDS
    )
    return ticks / os.sysconf("SC_CLK_TCK")


class Others:
    """A clock of what other programs take of the CPUs that the ranks may use."""

    def __init__(
        self, gather: Callable[[Any], list[Any]], cpus: Collection[int] | None = None
    ) -> None:
        """Begins to measure. Collective.

        Args:
            gather: Returns each rank's argument, as gather_objects() of the ranks' communicator.
                All ranks are of one machine.
            cpus: Numbers of the CPUs. Default: those that the ranks may use.
        """
        self._gather = gather
        allowed = gather(sorted(os.sched_getaffinity(0) if cpus is None else cpus))
        self._cpus = {cpu for each in allowed for cpu in each}
        self._began = self._now()

    def _now(self) -> tuple[float, float, float]:
        """Returns the time, and the seconds that the CPUs and the ranks have run. Collective."""
        ranks_s = sum(self._gather(time.process_time()))
        return time.perf_counter(), ran_s(_STAT.read_text(), self._cpus), ranks_s

    def share(self) -> float:
        """Returns the others' share of the CPUs' time since the start. Collective."""
        took, ran, of_ranks = (
            now - before for now, before in zip(self._now(), self._began, strict=True)
        )
        return max(0.0, ran - of_ranks) / (took * len(self._cpus))
