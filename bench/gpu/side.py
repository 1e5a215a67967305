"""Benches on the cuda backend: kccl in graphs and from Python, its peers beside it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import kccl

from ..harness.collective import Collective, Comm, Problem
from ..harness.measure import Contender, Row
from ..host.side import Floors
from ..peers.baselines import Request
from ..peers.flashinfer import FlashInferPeer
from ..peers.nvshmem import NvshmemPeer
from ..peers.torch import TorchPeers
from .clock import GpuClock, both_modes
from .device import Gpu
from .kernels import NAMES, SOURCE, PingPong

Peer = TorchPeers | FlashInferPeer | NvshmemPeer


def check_gpus(world_size: int) -> None:
    """A rank a GPU: ranks that share one would wait for each other's turn.

    Raises:
        ValueError: There are fewer GPUs than ranks.
    """
    count = kccl.gpu.num_devices()
    if world_size > count:
        raise ValueError(f"{world_size} ranks need as many GPUs, there are {count}")


class GpuJob:
    """What the benches of a job share on this rank's GPU. While it is open, that device is current
    in this thread.

    Attributes:
        gpu, clock: This rank's.
    """

    def __init__(self, comm: Comm) -> None:
        """Collective."""
        self._ends = ExitStack()
        self.gpu = Gpu(comm)
        self._ends.enter_context(self.gpu.device.current())
        module = kccl.compile(SOURCE, NAMES, target="cuda", arch=self.gpu.device.arch)
        self.clock = GpuClock(self.gpu, module)
        self.clock.use_streams()
        self._ping_pong = PingPong(comm, module) if comm.world_size > 1 else None
        self._elapsed_ns = self.gpu.numbers(np.zeros(1, np.int64))
        self._peers: list[Peer] = []

    def peers(self) -> Sequence[Peer]:
        """The peers, which take seconds to start when they are first asked for. Collective."""
        if not self._peers:
            # FlashInfer's ranks meet over torch.distributed.
            for kind in (TorchPeers, FlashInferPeer, NvshmemPeer):
                self._peers.append(kind(self.gpu, self.clock))
                self._ends.callback(self._peers[-1].close)
        return self._peers

    def one_way_us(self) -> float:
        """One way of a word between two GPUs; 0 where there is one. Collective."""
        if self._ping_pong is None:
            return 0.0
        self._ping_pong.enqueue(self._elapsed_ns, stream=self.gpu.stream)
        self.gpu.wait()
        (elapsed_ns,) = self.gpu.read(self._elapsed_ns.address, 1, np.int64)
        return self._ping_pong.one_way_us(int(elapsed_ns))

    def close(self) -> None:
        """Ends the peers. Collective."""
        self._ends.close()


class GpuSide:
    """As HostSide, on GPUs.

    Attributes:
        machine: What the document says of the machine besides the CPU.
    """

    def __init__(self, job: GpuJob, collective: Collective, *, has_baselines: bool) -> None:
        """Collective. The job stays open as long as this is used."""
        self._job = job
        self._collective = collective
        self._floors = Floors()
        self._peers = job.peers() if has_baselines else ()
        libraries = [each.libraries for each in self._peers]
        self.machine = describe(job.gpu, dict(ChainMap(*libraries)))

    def contenders(self, problem: Problem) -> list[Contender]:
        """kccl and its peers in both modes; first the floor is probed. Collective."""
        self._floors.one_ways_us.append(self._job.one_way_us())
        gpu, clock = self._job.gpu, self._job.clock
        buffers = gpu.buffers(problem)
        op = self._collective.prepare(gpu.comm, buffers, problem, stream=gpu.stream)
        names = ("kccl", op.plan.name, "prepared")
        found = both_modes(clock, self._collective, names, buffers, op, gpu.capture)
        for peer in self._peers:
            found += peer.contenders(self._collective, problem)
        return found

    def finish(
        self, rows: Sequence[Row], request: Request, problem: Problem
    ) -> tuple[list[Row], list[str]]:
        """As HostSide.finish(); no peer needs a job of its own."""
        found = list(rows)
        self._floors.add(found)
        return found, [note for peer in self._peers for note in peer.notes()]

    def close(self) -> None:
        """See HostSide; the job outlives this."""


def describe(gpu: Gpu, libraries: dict[str, str]) -> dict[str, Any]:
    """What a document says of a run's GPUs. Collective."""
    return {
        "gpus": gpu.comm.gather_objects(gpu.device.name),
        "cuda_driver": int(kccl.gpu.call("cuDriverGetVersion")),
        "libraries": libraries,
        "multicast": False,
    }
