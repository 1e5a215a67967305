"""Allocates and reads the memory for the stamps of a kernel that traces."""

from typing import Any

import kccl

from ..model.program import Program
from ..model.timeline import Stamps
from .launching import Launcher
from .memory import Arena
from .trace import layout_of, numbers_bytes


class Recording:
    """A rank's memory for the stamps of one request, which kernels/trace.cuh writes."""

    def __init__(
        self,
        comm: kccl.Communicator,
        launcher: Launcher,
        arena: Arena,
        module: Any,
        blocks: int,
        of_token_step: int,
        token_steps: int,
    ) -> None:
        """Allocates the memory. Collective.

        Args:
            comm: The communicator of all ranks.
            launcher: Launches kernels on the rank's device.
            arena: The rank's memory.
            module: A module with the kernel describe_trace.
            blocks: The number of the rank's blocks.
            of_token_step: The number of stamps of a block in a token step.
            token_steps: The number of token steps that are traced.
        """
        self._launcher, self._arena = launcher, arena
        self._blocks, self._token_steps = blocks, token_steps
        self._nbytes = 8 * token_steps * of_token_step * blocks
        self._numbers_bytes = numbers_bytes(of_token_step, blocks)
        # Allocation is collective, and all ranks must ask for the same number of bytes. A rank with
        # fewer lanes needs less, so all take the largest number.
        needs = comm.gather_objects([self._nbytes, self._numbers_bytes])
        self._stamps, self._numbers = (
            arena.allocate(max(each)) for each in zip(*needs, strict=True)
        )
        launcher.launch(module.kernel("describe_trace"), self._numbers, grid=blocks, warps=1)
        launcher.wait()
        # Waits until all ranks have loaded the kernel, because a GPU may load no kernel while
        # another rank's runs.
        comm.gather_objects(None)

    def give_to(self, task: Any) -> None:
        """Makes the request of `task`, a KcclDecodeTask, write its stamps to this memory."""
        task.trace, task.traced = self._stamps, self._token_steps

    def read(self, program: Program, rank: int) -> Stamps:
        """Waits for the request's kernel, and returns its stamps."""
        self._launcher.wait()
        numbers = self._arena.read(self._numbers, self._numbers_bytes)
        stamps = self._arena.read(self._stamps, self._nbytes)
        return Stamps.of(rank, layout_of(program, self._blocks, numbers), stamps)
