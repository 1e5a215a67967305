"""Programs that show planted bugs of postings."""

from dataclasses import dataclass

import numpy as np
from sim_machine import Machine, Outcome, compiled
from worlds import World

from .expert_programs import KcclWindow
from .program import NARROW

_WORDS = 3  # kPostedWords of tests/kernels/postings.cuh
_SLOTS = 8
_SLOT_BYTES = 9 * 128  # kPostingSlotBytes of postings.cuh


class PostedScript:
    """Calls by postings in one launch of each rank."""

    def __init__(self, world_size, calls, machine):
        self._world = World(world_size, machine.simulation(), machine.settings(), csrc=machine.csrc)
        name = f"kccl::kernels::posted_calls<{_SLOTS}>"
        kernel = compiled("postings.cuh", name, machine.warp_size, machine.csrc)
        nbytes = _SLOTS * _SLOT_BYTES
        self._windows = self._world.window(nbytes)
        addresses = [window.ctypes.data for window in self._windows]
        rng = np.random.default_rng(calls)
        given = rng.integers(1, 1 << 32, (world_size, calls, _WORDS), np.uint32)
        shape = world_size, calls, world_size, _WORDS + 1
        self._taken, self._want = np.zeros(shape, np.uint32), np.zeros(shape, np.uint32)
        for call in range(calls):
            root, is_broadcast = call // 40 % world_size, call // 20 % 2 == 0
            for rank in range(world_size):
                for source in range(world_size):
                    if source != rank and root == (source if is_broadcast else rank):
                        self._want[rank, call, source] = *given[source, call], call
        self._program = []
        self._given = given
        for rank in range(world_size):
            window = KcclWindow(nbytes, rank, world_size)
            window.address[:world_size] = addresses
            numbers = np.uint32(calls), given[rank], self._taken[rank]
            comm = self._world.device_comm(rank)
            launch = self._world.launch(
                rank, kernel, comm, window, *numbers, grid=1, block=machine.warp_size
            )
            self._program.append([launch])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._world.close()

    def run(self, seed):
        """Runs the calls under one seed. Returns the Outcome."""
        for array in (*self._windows, self._taken):
            array[:] = 0
        report = self._world.run(self._program, seed)
        kind = message = ""
        if report.findings:
            kind, message = report.findings[0].kind, str(report.findings[0])
        elif any(report.statuses):
            kind, message = "failed_call", f"statuses {report.statuses}"
        elif not (self._taken == self._want).all():
            rank, call, source, _ = np.argwhere(self._taken != self._want)[0].tolist()
            kind, message = "wrong_data", f"call {call}: what rank {rank} took of rank {source}"
        return Outcome(kind, message, report.stats, report.statuses)


@dataclass(frozen=True)
class PostedProgram:
    """As Program, for calls by postings."""

    world_size: int
    calls: int
    right: str = ""

    def script(self, **machine):
        return PostedScript(self.world_size, self.calls, Machine(**{**NARROW, **machine}))


PROGRAMS = {"postings": PostedProgram(3, 80)}
