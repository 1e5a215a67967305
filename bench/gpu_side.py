"""A bench on the cuda backend: kccl in graphs and from Python, NCCL and PyTorch beside it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import kccl

from .baselines import Request
from .collective import Collective, Comm, Problem
from .gpu_clock import GpuClock, both_modes
from .gpu_device import Gpu
from .gpu_kernels import NAMES, SOURCE, PingPong
from .gpu_peers import TorchPeers
from .harness import Contender, Row
from .host_side import Floors


def check_gpus(world_size: int) -> None:
    """A rank a GPU: ranks that share one would wait for each other's turn.

    Raises:
        ValueError: There are fewer GPUs than ranks.
    """
    count = kccl.gpu.num_devices()
    if world_size > count:
        raise ValueError(f"{world_size} ranks need as many GPUs, there are {count}")


class GpuSide:
    """As HostSide, on GPUs. While it is open, this rank's device is current in this thread.

    Attributes:
        machine: What the document says of the machine besides the CPU.
    """

    def __init__(self, comm: Comm, collective: Collective, *, has_baselines: bool) -> None:
        """Collective."""
        self._comm = comm
        self._collective = collective
        self._floors = Floors()
        self._ends = ExitStack()
        self._gpu = Gpu(comm)
        self._ends.enter_context(self._gpu.device.current())
        module = kccl.compile(SOURCE, NAMES, target="cuda", arch=self._gpu.device.arch)
        self._clock = GpuClock(self._gpu, module)
        self._ping_pong = PingPong(comm, module) if comm.world_size > 1 else None
        self._elapsed_ns = self._gpu.numbers(np.zeros(1, np.int64))
        self._peers: TorchPeers | None = None
        if has_baselines:
            self._peers = TorchPeers(self._gpu, self._clock)
            self._ends.callback(self._peers.close)
        libraries = self._peers.libraries if self._peers is not None else {}
        self.machine = describe(self._gpu, libraries)

    def contenders(self, problem: Problem) -> list[Contender]:
        """kccl and its peers in both modes; first the floor is probed. Collective."""
        self._floors.one_ways_us.append(self._one_way_us())
        gpu, comm = self._gpu, self._comm
        buffers = gpu.buffers(problem)
        op = self._collective.prepare(comm, buffers, problem, stream=gpu.stream)
        names = ("kccl", op.plan.name, "prepared")
        found = both_modes(self._clock, self._collective, names, buffers, op, gpu.capture)
        if self._peers is not None:
            found += self._peers.contenders(self._collective, problem)
        return found

    def finish(
        self, rows: Sequence[Row], request: Request, problem: Problem
    ) -> tuple[list[Row], list[str]]:
        """As HostSide.finish(); no peer needs a job of its own."""
        found = list(rows)
        self._floors.add(found)
        return found, self._peers.notes() if self._peers is not None else []

    def close(self) -> None:
        """Ends the peers. Collective."""
        self._ends.close()

    def _one_way_us(self) -> float:
        if self._ping_pong is None:
            return 0.0
        self._ping_pong.enqueue(self._elapsed_ns, stream=self._gpu.stream)
        self._gpu.wait()
        (elapsed_ns,) = self._gpu.read(self._elapsed_ns.address, 1, np.int64)
        return self._ping_pong.one_way_us(int(elapsed_ns))


def describe(gpu: Gpu, libraries: dict[str, str]) -> dict[str, Any]:
    """What a document says of a run's GPUs. Collective."""
    return {
        "gpus": gpu.comm.gather_objects(gpu.device.name),
        "cuda_driver": int(kccl.gpu.call("cuDriverGetVersion")),
        "libraries": libraries,
        "multicast": False,
    }
