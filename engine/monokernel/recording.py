"""Where the stamps of a kernel that traces come to lie."""

from typing import Any

import kccl

from ..model.program import Program
from ..model.timeline import Stamps
from .launching import Launcher
from .memory import Arena
from .trace import layout_of, numbers_bytes


class Recording:
    """A rank's memory for the stamps of one request: kernels/trace.cuh."""

    def __init__(
        self,
        comm: kccl.Communicator,
        launcher: Launcher,
        arena: Arena,
        module: Any,
        blocks: int,
        of_round: int,
        rounds: int,
    ) -> None:
        """Makes room. Collective.

        Args:
            comm: The ranks.
            launcher: The rank's.
            arena: The rank's.
            module: Has the kernel describe_trace.
            blocks: Of the rank.
            of_round: Stamps of a block's round.
            rounds: That are traced.
        """
        self._launcher, self._arena, self._blocks, self._rounds = launcher, arena, blocks, rounds
        self._nbytes = 8 * rounds * of_round * blocks
        self._numbers_bytes = numbers_bytes(of_round, blocks)
        # Ranks allocate together, and one with fewer lanes needs less.
        needs = comm.gather_objects([self._nbytes, self._numbers_bytes])
        self._stamps, self._numbers = (
            arena.allocate(max(each)) for each in zip(*needs, strict=True)
        )
        launcher.launch(module.kernel("describe_trace"), self._numbers, grid=blocks, warps=1)
        launcher.wait()
        # All ranks have loaded it: a GPU may load nothing while another rank's kernel runs.
        comm.gather_objects(None)

    def give_to(self, task: Any) -> None:
        """Has a request, a KcclDecodeTask, leave its stamps here."""
        task.trace, task.traced = self._stamps, self._rounds

    def read(self, program: Program, rank: int) -> Stamps:
        """What a request has left, when it has ended."""
        self._launcher.wait()
        numbers = self._arena.read(self._numbers, self._numbers_bytes)
        stamps = self._arena.read(self._stamps, self._nbytes)
        return Stamps.of(rank, layout_of(program, self._blocks, numbers), stamps)
