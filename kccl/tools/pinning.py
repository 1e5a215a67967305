"""Which core each rank of `kccl run` is pinned to."""

import errno
import os
from collections.abc import Callable


def cores() -> list[int]:
    """The allowed logical CPUs: one of each core, then their SMT siblings."""
    from ..topology import discover

    machine = discover()
    allowed = sorted(os.sched_getaffinity(0))
    siblings = {cpu.id: cpu.smt_siblings or (cpu.id,) for cpu in machine.cpus}

    def turn(cpu: int) -> tuple[int, int]:
        return sum(other in allowed for other in siblings.get(cpu, ()) if other < cpu), cpu

    return sorted(allowed, key=turn)


def pin_to(cpus: set[int], report: Callable[[str], None]) -> bool:
    """Pins this process. Where the system forbids it, reports that and returns False."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        report(f"the ranks are not pinned: sched_setaffinity is forbidden ({error.strerror})")
        return False
    return True
