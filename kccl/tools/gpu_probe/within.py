"""Measures one GPU: latencies between its compute units, parts of L2, bandwidths, its host."""

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
CLUSTERS = (8, 7, 6, 5, 4, 3, 2)  # the largest that every GPU with clusters runs, and less
KERNELS = (
    *("probe_clock", "probe_units", "probe_lines", "probe_polls", "probe_read", "probe_write"),
    "probe_answer",
    *(f"probe_clusters_{size}" for size in CLUSTERS),
)
# As in kernels.cuh.
_OUTBOX_BYTES = 32 * LINE_BYTES
_CHASED = 4
_AT_ONCE = 8
_BYTES_AT_ONCE = 16 * _AT_ONCE  # of a thread
_STOP = 0x7FFFFFFF
_LIMIT_NS = 200_000_000
_HOST_LIMIT_NS = 2_000_000_000


@dataclass(frozen=True)
class Sizes:
    """How much a probe does. What is there by default takes a few seconds on a GPU.

    Attributes:
        warm_ns: How long the GPU is busy first, so that its clock goes up.
        trips: Round trips between two units, the first `warmup` of which are not timed.
        warmup: See there.
        repeats: How often all pairs are measured; the least time counts.
        lines: Lines whose latency from each unit is measured.
        stay_ns: How long a block of a cluster stays at least; some stay 7 times as long.
        cluster_waves: Blocks of clusters for each unit in one launch.
        cluster_rounds: Launches of each size of cluster, at most.
        cluster_patience: Rounds that tell nothing new, after which no more are run.
        polls: Loads that are timed, idle and loaded.
        memory_bytes, cache_bytes, host_bytes: Sizes of what is read and written.
        threads, cache_threads: Threads of a block that does so.
        passes, batches: Passes over the data in one batch; the median batch counts.
        settle_ns: How long a stream runs before something is timed beside it.
        host_trips: Round trips with the host.
        peer_bytes, peer_trips: Bytes that one GPU writes to another, and round trips of two.
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
    """The probe's kernels, compiled for a communicator's GPU, or from the cache.

    Raises:
        CompileError, BackendError: As kccl.compile().
    """
    return compile_kernels(SOURCE, KERNELS, target=comm.backend)


class Within:
    """One GPU on which kernels run that need no peer."""

    def __init__(self, comm: Communicator, module: Module, sizes: Sizes) -> None:
        """Args: the communicator of this GPU's rank, module_for() it, and how much to do."""
        self._comm = comm
        self._module = module
        self._sizes = sizes
        self.device = gpu.device(comm.empty(1).device)
        with self.device.current():
            self.stream = gpu.make_stream()
        self._blocks = self.device.multiprocessors
        # More than half of the most: so each unit runs one block.
        self._alone = self.device.shared_bytes // 2 + 1024

    def measure(self) -> topology.GpuProbe:
        """Measures everything.

        Raises:
            BackendError: Another program has a part of the GPU, or what was measured is no number.
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
        # A page is the unit that AMD's memory is spread by.
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
        """Ticks of a unit's clock in a microsecond, when the GPU has been busy for a while."""
        numbers = self._zeros(16)
        warm_ns = self._sizes.warm_ns
        for wait_ns in (warm_ns, warm_ns // 5):
            self._run("probe_clock", np.uint64(wait_ns), numbers.address)
        ticks, ns = self._read(numbers, np.uint64)
        if not ticks or not ns:
            raise BackendError(f"the GPU's clock shows {ticks} ticks in {ns} ns")
        return float(ticks) / float(ns) * 1e3

    def _units(self, ticks_of_us: float) -> tuple[Array, list[list[float | None]]]:
        """(unit, die) of each block, and microseconds from each to each, one way."""
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
                # By number: another launch may give a block another unit.
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
        """Ticks of a load of each line by each unit, in the order of units."""
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
        """Units that ran blocks of one cluster; none where the GPU has no clusters."""
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
        """The units of each cluster of so many blocks, each of which has a unit to itself."""
        grid = self._blocks * self._sizes.cluster_waves // size * size
        units = self._zeros(grid * 4)
        args = units.address, np.uint64(self._sizes.stay_ns), np.uint32(seed * grid)
        self._run(f"probe_clusters_{size}", *args, grid=grid, alone=True)
        rows = self._read(units, np.uint32).reshape(-1, size)
        return {tuple(sorted(set(row))) for row in rows.tolist()}

    def _polls(self, ticks_of_us: float) -> dict[str, float]:
        """A poll and a ping-pong, idle and beside a full stream."""
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
                # Turns of a reader: a few seconds, should nothing end it.
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
        # The idle pair is one of those that the matrix has.
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
        """Gigabytes a second at which the kernel of a name reads or writes memory: the median batch
        but the first. This thread's current device is the GPU.
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
        """A word between this thread and the GPU, which both poll the host's memory."""
        words = self._zeros(2 * LINE_BYTES, on_host=True)
        mine, theirs = words.address, words.address + LINE_BYTES
        # The kernel's argument: where the host writes, and where it polls.
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
    """90 of "sm_90a"."""
    return int("".join(filter(str.isdigit, arch)))
