"""The contenders, floors and notes of a bench on GPUs: kccl and its peers, in graphs and from
Python.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

import kccl

from ..harness.collective import Collective
from ..harness.measure import Contender, Row
from ..harness.problem import Comm, Problem
from ..host.side import Floors
from ..peers.flashinfer import FlashInferPeer
from ..peers.nvshmem import NvshmemPeer
from ..peers.torch import TorchPeers
from .clock import GpuClock, both_modes
from .device import Gpu
from .kernels import NAMES, SOURCE, PingPong

Peer = TorchPeers | FlashInferPeer | NvshmemPeer


def check_gpus(world_size: int) -> None:
    """Checks that there is a GPU for each rank. Ranks that share a GPU would wait for each other.

    Raises:
        ValueError: There are fewer GPUs than ranks.
    """
    count = kccl.gpu.num_devices()
    if world_size > count:
        raise ValueError(f"{world_size} ranks need as many GPUs, there are {count}")


class GpuJob:
    """State on this rank's GPU that the benches of a job share. The device is current in this
    thread until close().

    Attributes:
        gpu, clock: This rank's GPU, and its clock.
    """

    def __init__(self, comm: Comm) -> None:
        """Makes the object. Collective."""
        self._ends = ExitStack()
        self.gpu = Gpu(comm)
        self._ends.enter_context(self.gpu.device.current())
        module = kccl.compile(SOURCE, NAMES, target=comm.backend, arch=self.gpu.device.arch)
        self.clock = GpuClock(self.gpu, module)
        self.clock.use_streams()
        self._ping_pong = PingPong(comm, module) if comm.world_size > 1 else None
        self._elapsed_ns = self.gpu.numbers(np.zeros(1, np.int64))
        self._peers: list[Peer] = []

    def peers(self) -> Sequence[Peer]:
        """Returns the peers. The first call starts them, which takes seconds. Collective."""
        if not self._peers:
            # TorchPeers come first, because FlashInfer's ranks connect through torch.distributed.
            for kind in (TorchPeers, FlashInferPeer, NvshmemPeer):
                self._peers.append(kind(self.gpu, self.clock))
                self._ends.callback(self._peers[-1].close)
        return self._peers

    def one_way_us(self) -> float:
        """Returns the one-way latency of a word between two GPUs in microseconds; 0 with one rank.
        Collective.
        """
        if self._ping_pong is None:
            return 0.0
        self._ping_pong.enqueue(self._elapsed_ns, stream=self.gpu.stream)
        self.gpu.wait()
        (elapsed_ns,) = self.gpu.read(self._elapsed_ns.address, 1, np.int64)
        return self._ping_pong.one_way_us(int(elapsed_ns))

    def close(self) -> None:
        """Shuts the peers down. Collective."""
        self._ends.close()


class GpuSide:
    """Does what HostSide does, on GPUs.

    Attributes:
        machine: Facts about the machine that the document needs besides those of the CPU.
    """

    def __init__(self, job: GpuJob, collective: Collective, *, has_baselines: bool) -> None:
        """Makes the object. Collective. The job must stay open as long as this object is used."""
        self._job = job
        self._collective = collective
        self._floors = Floors()
        self._peers = job.peers() if has_baselines else ()
        libraries = [each.libraries for each in self._peers]
        self.machine = describe(job.gpu, dict(ChainMap(*libraries)))

    def contenders(self, problem: Problem) -> list[Contender]:
        """Probes the floor. Returns kccl's and the peers' contenders in both modes. Collective."""
        self._floors.one_ways_us.append(self._job.one_way_us())
        gpu, clock = self._job.gpu, self._job.clock
        buffers = gpu.buffers(problem)
        op = self._collective.prepare(gpu.comm, buffers, problem, stream=gpu.stream)
        names = ("kccl", op.plan.name, "prepared")
        found = both_modes(clock, self._collective, names, buffers, op, gpu.capture)
        for peer in self._peers:
            found += peer.contenders(self._collective, problem)
        return found

    def probe_again(self, problem: Problem) -> None:
        """Probes nothing, because a GPU's latency does not drift: see HostSide.probe_again()."""

    def fill(self, rows: Sequence[Row]) -> None:
        """See HostSide.fill()."""
        self._floors.add(rows)

    def notes(self) -> list[str]:
        """See HostSide.notes()."""
        return [note for peer in self._peers for note in peer.notes()]

    def close(self) -> None:
        """Does nothing: the caller closes the job."""


def describe(gpu: Gpu, libraries: dict[str, str]) -> dict[str, Any]:
    """Returns the facts about a run's GPUs for its document. Collective."""
    return {
        "gpus": gpu.comm.gather_objects(gpu.device.name),
        f"{gpu.comm.backend}_driver": kccl.gpu.driver_version(),
        "libraries": libraries,
        "multicast": False,
    }
