"""Measures each pair of GPUs: latency of a word, and bandwidth of writes into a peer's window."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ... import gpu
from ...base.errors import Timeout
from ...bench.gpu.kernels import LINES_BYTES
from ...bench.gpu.kernels import SOURCE as PING_PONG
from ...module import compile as compile_kernels
from .within import Sizes, Within

if TYPE_CHECKING:
    from ...comm import Communicator

_LIMIT_NS = 2_000_000_000
Cells = list[list[float | None]]


class Between:
    """Measures between this rank's GPU and its peers'. All methods are collective."""

    def __init__(self, comm: Communicator, within: Within, sizes: Sizes) -> None:
        """Opens a window for the measurements, and compiles the ping-pong kernel.

        Args:
            comm: This rank's communicator.
            within: The measurements of this rank's GPU.
            sizes: How much to measure.
        """
        self._comm = comm
        self._within = within
        self._nbytes = sizes.peer_bytes
        self._rounds = sizes.peer_trips
        self._window = comm.window(max(sizes.peer_bytes, LINES_BYTES))
        module = compile_kernels(PING_PONG, ["ping_pong"], target=comm.backend)
        self._kernel, self._block = module.kernel("ping_pong"), module.warp_size

    def measure(self) -> tuple[Cells, Cells]:
        """Returns two matrices from rank i to rank j: microseconds of a word, one way, and
        gigabytes a second of writes. Cells with i equal to j are None.

        Raises:
            Timeout: Two GPUs did not answer each other.
        """
        size = self._comm.world_size
        us: Cells = [[None] * size for _ in range(size)]
        gbps: Cells = [[None] * size for _ in range(size)]
        first = 1
        # Latencies come first: the writes for bandwidth overwrite the words of the ping-pong.
        for i in range(size):
            for j in range(i):
                us[i][j] = us[j][i] = self._one_way_us(j, i, first)
                first += 2 * self._rounds
        for i in range(size):
            for j in range(size):
                if i != j:
                    gbps[i][j] = self._gbps(i, j)
        return us, gbps

    def _one_way_us(self, leader: int, other: int, first: int) -> float:
        comm, within = self._comm, self._within
        comm.gather_objects(None)
        elapsed: Any = None
        if comm.rank in (leader, other):
            addresses = self._window.addresses
            peer = other if comm.rank == leader else leader
            with within.device.current():
                memory = gpu.Memory(within.device, 8, within.stream)
                self._kernel(
                    comm,
                    addresses[comm.rank],
                    addresses[peer],
                    np.uint32(first),
                    np.uint32(self._rounds),
                    comm.rank == leader,
                    np.uint64(_LIMIT_NS),
                    memory.address,
                    block=self._block,
                    stream=within.stream,
                )
                data = gpu.read(memory.address, 8, within.stream)
                elapsed = int.from_bytes(data, "little")
        told = comm.gather_objects(elapsed)
        if not told[leader] or not told[other]:
            raise Timeout(
                f"ranks {leader} and {other} did not answer each other in the ping-pong",
                rank=comm.rank,
                peer=other,
                collective="ping-pong",
            )
        return float(told[leader]) / self._rounds / 2 / 1e3

    def _gbps(self, source: int, target: int) -> float:
        """Returns the gigabytes a second at which `source` writes while all other GPUs are idle."""
        comm, within = self._comm, self._within
        comm.gather_objects(None)
        found = None
        if comm.rank == source:
            with within.device.current():
                found = within.gbps("probe_write", self._window.addresses[target], self._nbytes)
        return float(comm.gather_objects(found)[source])
