"""Measures one GPU: latencies between its compute units, to lines in L2, and to the host; and
bandwidths.
"""

from __future__ import annotations

import ctypes
import statistics
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import gpu, topology
from ...base.abi import LINE_BYTES, ffi, lib
from ...base.errors import BackendError
from ...module import Module
from ...module import compile as compile_kernels
from ...topology.partitions import joined

if TYPE_CHECKING:
    from ...comm import Communicator

    Array = np.ndarray[Any, Any]

SOURCE = Path(__file__).with_name("kernels.cuh")
CLUSTERS = (8, 7, 6, 5, 4, 3, 2)  # in blocks; 8 is the largest that all GPUs with clusters can run
KERNELS = (
    *("probe_clock", "probe_units", "probe_lines", "probe_polls", "probe_read", "probe_write"),
    "probe_answer",
    *(f"probe_clusters_{size}" for size in CLUSTERS),
)
# These must equal the constants in kernels.cuh.
_OUTBOX_BYTES = 32 * LINE_BYTES
_CHASED = 4
_AT_ONCE = 8
_BYTES_AT_ONCE = 16 * _AT_ONCE  # that a thread loads before it waits
_STOP = 0x7FFFFFFF
_LIMIT_NS = 200_000_000
_HOST_LIMIT_NS = 2_000_000_000


@dataclass(frozen=True)
class Sizes:
    """How much a probe measures. The defaults take a few seconds on a GPU.

    Attributes:
        warm_ns: How long the GPU is kept busy first, so that its clock goes up.
        trips: Round trips of a ping-pong between two units.
        warmup: The first round trips of a ping-pong, which are not timed.
        repeats: How often all pairs are measured. The least time of a pair counts.
        lines: Number of lines in L2 whose latency from each unit is measured.
        stay_ns: The least time for which a block of a cluster occupies its unit. Some stay 7 times
            as long.
        cluster_waves: How many blocks a launch of clusters has for each unit of the GPU.
        cluster_rounds: The most launches for each size of cluster.
        cluster_patience: After so many rounds in a row that find no new group, no more are run.
        polls: Number of loads that are timed, once on an idle and once on a busy GPU.
        memory_bytes, cache_bytes, host_bytes: Bytes that are read or written in GPU memory, in L2
            and in host memory.
        threads, cache_threads: Threads of a block that reads or writes, and of one that reads L2.
        passes, batches: Passes over the data in one batch, and batches. The median batch counts.
        settle_ns: How long readers run before something is timed beside them.
        host_trips: Round trips with the host.
        peer_bytes, peer_trips: Bytes that one GPU writes to another, and their round trips.
    """

    warm_ns: int = 50_000_000
    trips: int = 72
    warmup: int = 8
    repeats: int = 3
    lines: int = 512
    stay_ns: int = 5_000
    cluster_waves: int = 8
    cluster_rounds: int = 16
    cluster_patience: int = 3
    polls: int = 1024
    memory_bytes: int = 1 << 30
    cache_bytes: int = 20 << 20
    host_bytes: int = 64 << 20
    threads: int = 1024
    cache_threads: int = 256
    passes: int = 4
    batches: int = 5
    settle_ns: int = 100_000
    host_trips: int = 2000
    peer_bytes: int = 64 << 20
    peer_trips: int = 2000


def module_for(comm: Communicator) -> Module:
    """Compiles the probe's kernels for a communicator's backend, or loads them from the cache.

    Raises:
        CompileError, BackendError: As kccl.compile().
    """
    return compile_kernels(SOURCE, KERNELS, target=comm.backend)


class Within:
    """Measures one GPU by kernels that need no peer."""

    def __init__(self, comm: Communicator, module: Module, sizes: Sizes) -> None:
        """Makes a stream on the rank's GPU.

        Args:
            comm: The communicator of this GPU's rank.
            module: The result of module_for(comm).
            sizes: How much to measure.
        """
        self._comm = comm
        self._module = module
        self._sizes = sizes
        self.device = gpu.device(comm.empty(1).device)
        with self.device.current():
            self.stream = gpu.make_stream()
        self._blocks = self.device.multiprocessors
        # More than half of a unit's shared memory, so that a unit runs only one block at a time.
        self._alone = self.device.shared_bytes // 2 + 1024

    def measure(self) -> topology.GpuProbe:
        """Makes all measurements. Takes a few seconds with the default sizes.

        Raises:
            BackendError: Blocks did not run on all units, as beside another program, or something
                did not answer.
        """
        with self.device.current():
            ticks_of_us = self._ticks_of_us()
            places, one_way = self._units(ticks_of_us)
            lines = self._lines(places)
            figures = {"clock_mhz": ticks_of_us}
            figures |= self._polls(ticks_of_us)
            figures |= self._bandwidths()
            figures |= self._with_host()
            return topology.GpuProbe(
                units=tuple(map(int, places[:, 0])),
                dies=tuple(map(int, places[:, 1])),
                unit_name="sm" if self._comm.backend == "cuda" else "cu",
                unit_to_unit_us=one_way,
                line_ticks=lines,
                line_stride_bytes=self._stride,
                together=self._clusters(),
                figures=figures,
            )

    @property
    def _stride(self) -> int:
        # AMD's GPUs distribute memory by pages, so the measured lines are a page apart.
        return LINE_BYTES if self._comm.backend == "cuda" else 4096

    def _run(
        self, name: str, *args: Any, grid: int = 1, block: int = 0, alone: bool = False
    ) -> None:
        self._module.kernel(name)(
            self._comm,
            *args,
            grid=grid,
            block=block or self._module.warp_size,
            shared_bytes=self._alone if alone else 0,
            stream=self.stream,
        )

    def _zeros(self, nbytes: int, *, on_host: bool = False) -> gpu.Memory:
        return gpu.Memory(self.device, nbytes, self.stream, on_host=on_host)

    def _read(self, memory: gpu.Memory, dtype: Any) -> Array:
        data = gpu.read(memory.address, memory.nbytes, self.stream)
        return np.frombuffer(data, dtype)

    def _ticks_of_us(self) -> float:
        """Returns the ticks of a unit's clock in a microsecond, after keeping the GPU busy."""
        numbers = self._zeros(16)
        warm_ns = self._sizes.warm_ns
        for wait_ns in (warm_ns, warm_ns // 5):
            self._run("probe_clock", np.uint64(wait_ns), numbers.address)
        ticks, ns = self._read(numbers, np.uint64)
        if not ticks or not ns:
            raise BackendError(f"the GPU's clock shows {ticks} ticks in {ns} ns")
        return float(ticks) / float(ns) * 1e3

    def _units(self, ticks_of_us: float) -> tuple[Array, list[list[float | None]]]:
        """Returns (unit, die) of each unit in the order of their numbers, and the matrix of
        microseconds between each two units, one way.
        """
        count, sizes = self._blocks, self._sizes
        outboxes = self._zeros(count * _OUTBOX_BYTES)
        places = self._zeros(count * 8)
        rounds = count - 1 + count % 2
        best: dict[tuple[int, int], int] = {}
        numbers: Array | None = None
        for repeat in range(sizes.repeats):
            ticks = self._zeros(count * count * 8)
            first = np.uint32(1 + repeat * rounds * sizes.trips)
            trips = np.uint32(sizes.trips), np.uint32(sizes.warmup), np.uint64(_LIMIT_NS)
            addresses = outboxes.address, first, *trips, ticks.address, places.address
            self._run("probe_units", *addresses, grid=count, alone=True)
            now = self._read(places, np.uint32).reshape(count, 2)
            self._check_places(now)
            if numbers is None:
                numbers = now
            taken = self._read(ticks, np.uint64).reshape(count, count)
            for i, j in zip(*map(np.ndarray.tolist, np.nonzero(taken)), strict=True):
                # Keyed by unit, because in another launch a block may run on another unit.
                pair = int(now[i, 0]), int(now[j, 0])
                best[pair] = min(int(taken[i, j]), best.get(pair, int(taken[i, j])))
        assert numbers is not None, "repeats is 1 or more"
        half_trips = 2 * (sizes.trips - sizes.warmup) * ticks_of_us
        order = numbers[np.argsort(numbers[:, 0])]
        ids = order[:, 0].tolist()
        missing = len(ids) * (len(ids) - 1) - len(best)
        if missing:
            raise BackendError(f"{missing} pairs of compute units did not answer in a ping-pong")
        return order, [[_divided(best.get((a, b)), half_trips) for b in ids] for a in ids]

    def _check_places(self, places: Array) -> None:
        found = len(set(places[:, 0].tolist()))
        if found != self._blocks:
            raise BackendError(
                f"{self._blocks} blocks ran on {found} compute units of {self.device.name}: "
                "is another program on it, or is it a part of a GPU?"
            )

    def _lines(self, order: Array) -> list[list[float]]:
        """Returns [unit][line]: the ticks of a load. `order` gives the order of the units."""
        count, sizes = self._blocks, self._sizes
        data = self._zeros(sizes.lines * self._stride)
        ticks = self._zeros(count * sizes.lines * 4)
        places = self._zeros(count * 8)
        numbers = np.uint32(sizes.lines), np.uint32(self._stride // 4), np.uint32(6)
        addresses = data.address, *numbers, ticks.address, places.address
        self._run("probe_lines", *addresses, grid=count, alone=True)
        now = self._read(places, np.uint32).reshape(count, 2)
        self._check_places(now)
        taken = self._read(ticks, np.uint32).reshape(count, sizes.lines) / _CHASED
        missing = int((taken == 0).sum())
        if missing:
            raise BackendError(f"{missing} loads of lines by compute units were not timed")
        rows = dict(zip(now[:, 0].tolist(), taken.tolist(), strict=True))
        return [rows[unit] for unit in order[:, 0].tolist()]

    def _clusters(self) -> tuple[tuple[int, ...], ...]:
        """Returns sets of units that ran blocks of one cluster, so are in one GPC. Returns none if
        the GPU has no clusters.
        """
        if self._comm.backend != "cuda" or _version(self.device.arch) < 90:
            return ()
        found: set[tuple[int, ...]] = set()
        groups: tuple[tuple[int, ...], ...] = ()
        unchanged = 0
        for seed in range(self._sizes.cluster_rounds):
            for size in CLUSTERS:
                found |= self._clusters_of(size, seed)
            before, groups = groups, joined(set().union(*found), found)
            unchanged = unchanged + 1 if groups == before else 0
            if unchanged == self._sizes.cluster_patience:
                break
        return tuple(sorted(found))

    def _clusters_of(self, size: int, seed: int) -> set[tuple[int, ...]]:
        """Runs clusters of `size` blocks, one block on a unit. Returns each cluster's units."""
        grid = self._blocks * self._sizes.cluster_waves // size * size
        units = self._zeros(grid * 4)
        args = units.address, np.uint64(self._sizes.stay_ns), np.uint32(seed * grid)
        self._run(f"probe_clusters_{size}", *args, grid=grid, alone=True)
        rows = self._read(units, np.uint32).reshape(-1, size)
        return {tuple(sorted(set(row))) for row in rows.tolist()}

    def _polls(self, ticks_of_us: float) -> dict[str, float]:
        """Measures a poll and a ping-pong: on an idle GPU, and while all other warps read memory.

        Returns:
            Names of figures -> microseconds; and the gigabytes a second of the reads.
        """
        sizes = self._sizes
        lines = self._zeros(3 * _OUTBOX_BYTES + LINE_BYTES)
        numbers, sink = self._zeros(32), self._zeros(8)
        data = self._zeros(sizes.memory_bytes)
        found = {}
        for prefix, block in (("", self._module.warp_size), ("loaded_", sizes.threads)):
            lines.clear()
            loaded = bool(prefix)
            self._run(
                "probe_polls",
                lines.address,
                np.uint32(1),
                np.uint32(sizes.polls),
                np.uint32(sizes.polls // 2 + sizes.warmup),
                np.uint32(sizes.warmup),
                np.uint64(sizes.settle_ns),
                np.uint64(_LIMIT_NS),
                data.address,
                np.uint64(sizes.memory_bytes // 16),
                # The most turns of the loop in which a warp reads memory. They last a few seconds
                # if the ping-pong does not end the loop before.
                np.uint32(1 << 20),
                numbers.address,
                sink.address,
                grid=self._blocks,
                block=block,
                alone=True,
            )
            polled, played, loads, taken = self._read(numbers, np.uint64).tolist()
            if not polled or not played:
                raise BackendError("two compute units did not answer each other in a ping-pong")
            found[f"{prefix}poll_us"] = polled / sizes.polls / ticks_of_us
            trips = sizes.polls // 2
            found[f"{prefix}unit_to_unit_us"] = played / trips / 2 / ticks_of_us
            if loaded and taken:
                readers = self._blocks * (sizes.threads - self._module.warp_size)
                found["loaded_gbps"] = loads * 16 * readers / (taken / ticks_of_us) / 1e3
        # Drops the ping-pong on the idle GPU: the matrix unit_to_unit_us has this pair already.
        del found["unit_to_unit_us"]
        return found

    def _bandwidths(self) -> dict[str, float]:
        sizes = self._sizes
        memory = self._zeros(sizes.memory_bytes)
        found = {"memory_gbps": self.gbps("probe_read", memory.address, sizes.memory_bytes)}
        passes, threads = 16 * sizes.passes, sizes.cache_threads
        found["cache_gbps"] = self.gbps(
            "probe_read", memory.address, sizes.cache_bytes, passes=passes, threads=threads
        )
        host = self._zeros(sizes.host_bytes, on_host=True)
        for what, name in (("from_host_gbps", "probe_read"), ("to_host_gbps", "probe_write")):
            found[what] = self.gbps(name, host.address, sizes.host_bytes, passes=1)
        return found

    def gbps(
        self, name: str, address: int, nbytes: int, *, passes: int = 0, threads: int = 0
    ) -> float:
        """Returns the gigabytes a second at which a kernel reads or writes memory.

        It takes the median time of the batches, without the first batch. The GPU must be this
        thread's current device.

        Args:
            name: "probe_read" or "probe_write".
            address, nbytes: The memory.
            passes: Passes over the memory in one batch; 0: Sizes.passes.
            threads: Threads of a block; 0: Sizes.threads.
        """
        sizes = self._sizes
        passes, threads = passes or sizes.passes, threads or sizes.threads
        grid = 2 * self._blocks
        turn = grid * threads * _BYTES_AT_ONCE
        if nbytes < turn:
            grid = max(1, nbytes // (threads * _BYTES_AT_ONCE))
            turn = grid * threads * _BYTES_AT_ONCE
        sink = self._zeros(8)
        args: tuple[Any, ...] = (address, np.uint64(nbytes // 16), np.uint32(passes))
        args += (sink.address,) if name == "probe_read" else ()
        batch = partial(self._run, name, *args, grid=grid, block=threads)
        _, *times = gpu.intervals_us(self.stream, [batch] * (sizes.batches + 1))
        moved = nbytes // turn * turn * passes
        return moved / statistics.median(times) / 1e3

    def _with_host(self) -> dict[str, float]:
        """Measures a word's way between this thread and the GPU, which both poll host memory."""
        words = self._zeros(2 * LINE_BYTES, on_host=True)
        mine, theirs = words.address, words.address + LINE_BYTES
        # The kernel polls `theirs`, which the host writes, and writes `mine`, which the host polls.
        self._run("probe_answer", theirs, mine, np.uint32(_STOP), np.uint64(_HOST_LIMIT_NS))
        as_words = [ffi.cast("uint32_t *", each) for each in (mine, theirs)]
        ns = lib.kccl_host_ping_pong(*as_words, self._sizes.host_trips, True, _HOST_LIMIT_NS)
        ctypes.c_uint32.from_address(theirs).value = _STOP
        gpu.synchronize_stream(self.stream)
        if ns < 0:
            raise BackendError("the GPU did not answer the host in a ping-pong")
        return {"host_us": float(ns) * 1e-3}


def _divided(ticks: int | None, by: float) -> float | None:
    return None if ticks is None else ticks / by


def _version(arch: str) -> int:
    """Returns the number in an architecture's name: 90 for "sm_90a"."""
    return int("".join(filter(str.isdigit, arch)))
