"""For the tests of bench: ranks as threads with a fake communicator, and rows to report on."""

from __future__ import annotations

import argparse
import io
import json
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import collectives
import numpy as np
import pytest
from rich.console import Console

import kccl
from kccl.bench import cli
from kccl.bench import collectives as bench_collectives
from kccl.bench.harness import measure, report
from kccl.ranks.agreement import json_of

Broken = Callable[[np.ndarray, int], None]


class FakeWorld:
    """Ranks as threads of one process; `broken` may spoil the result that a rank is given."""

    def __init__(self, world_size: int, broken: Broken | None = None) -> None:
        self.world_size = world_size
        self.broken = broken
        self.slots: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size)

    def run(self, main: Callable[[FakeComm], Any]) -> list[Any]:
        """main(comm) in one thread per rank; results by rank, the first exception raised."""
        results: list[Any] = [None] * self.world_size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = main(FakeComm(self, rank))
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def exchange(self, rank: int, item: Any) -> list[Any]:
        self.slots[rank] = item
        self.barrier.wait(30)
        items = list(self.slots)
        self.barrier.wait(30)
        return items


class FakeComm:
    """As much of a communicator as the benchmarks use."""

    backend = "host"
    launcher = "kccl run"
    num_nodes = 1
    layout = "topology"

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.world_size = world.world_size
        for name in collectives.NAMES:
            call = partial(collectives.load(name).fake, self)
            setattr(self, name, FakeCollective(name, call))

    def gather_objects(self, item: Any) -> list[Any]:
        # The real one sends JSON.
        return [json.loads(text) for text in self.world.exchange(self.rank, json_of(item))]

    def algorithms(self, name: str) -> list[str]:
        return [f"{name}_one_shot_ll16", f"{name}_slow"]


class FakeCollective:
    def __init__(self, name: str, function: Callable[..., None]) -> None:
        self.name = name
        self.function = function

    def __call__(self, *args: Any, **keywords: Any) -> None:
        self.function(*args, **keywords)

    def prepare(self, *args: Any, algorithm: str | None = None, **keywords: Any) -> FakeOp:
        if algorithm is not None and algorithm.endswith("_slow") and args and args[0].nbytes < 16:
            raise kccl.InvalidArgument(f"{algorithm} needs 16 bytes")
        name = algorithm or f"{self.name}_one_shot_ll16"
        return FakeOp(partial(self.function, *args, **keywords), name)


class FakeOp:
    def __init__(self, call: Callable[[], None], name: str) -> None:
        self.call = call
        self.delay_s = 0.003 if name.endswith("_slow") else 0.0
        self.plan = SimpleNamespace(name=name, blocks=1)

    def __call__(self) -> None:
        time.sleep(self.delay_s)
        self.call()

    def time(self, iterations: int, warmup: int = 0) -> np.ndarray:
        for _ in range(warmup):
            self()
        times_us = np.empty(iterations)
        for i in range(iterations):
            start = time.perf_counter_ns()
            self()
            times_us[i] = (time.perf_counter_ns() - start) / 1e3
        return times_us


def off_by_one(result: np.ndarray, rank: int) -> None:
    result[:] = np.roll(result, 1)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kccl.probe, "one_way_latency_us", lambda comm: 0.25)
    monkeypatch.setattr(kccl.probe, "copy_us", lambda comm, nbytes: nbytes / 1000)


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args([*argv, "--iterations", "4", "--repeats", "2"])


def problem(dtype: str = "float32", op: str = "sum", count: int = 64, n: int = 4) -> Any:
    numpy_dtype = kccl.dtypes.to_numpy(dtype)
    table = bench_collectives.load("all_reduce")
    return table.problems(
        [count * numpy_dtype.itemsize],
        dtype=dtype,
        np_dtype=numpy_dtype,
        op=op,
        root=0,
        in_place=True,
        world_size=n,
    )[0]


def row(**changes: Any) -> measure.Row:
    values = {
        "library": "kccl",
        "collective": "all_reduce",
        "algorithm": "all_reduce_one_shot_ll16",
        "mode": "eager",
        "call": "prepared",
        "complete": "message",
        "order": "relaxed",
        "world_size": 2,
        "blocks": 1,
        "bytes": 8,
        "dtype": "float32",
        "op": "sum",
        "in_place": True,
        "time_us": 1.0,
        "p99_us": 2.0,
        "skew_us": 0.1,
        "rank_min_us": 0.9,
        "rank_avg_us": 0.95,
        "rank_max_us": 1.0,
        "q1_us": 1.0,
        "q3_us": 1.0,
        "skewed_us": None,
        "host_us": None,
        "floor_us": 0.1,
        "floor_before_us": None,
        "floor_after_us": None,
        "algbw_gbps": 0.008,
        "busbw_gbps": 0.008,
        "wrong": 0,
        "notes": [],
    }
    assert tuple(values) == measure.COLUMNS
    return values | changes


def screen_of(rows: list[measure.Row], *, verbose: bool, width: int = 80) -> list[str]:
    """What a run prints of these rows on a screen, size by size."""
    file = io.StringIO()
    out = Console(file=file, highlight=False, markup=False, width=width)
    screen = report.Screen(out, verbose=verbose, has_peers=False)
    for _, group in groupby(rows, key=lambda each: each["bytes"]):
        screen.add(list(group))
    screen.end(rows)
    return file.getvalue().splitlines()


def gpu_document(*rows: measure.Row) -> dict[str, Any]:
    """A document as of a run on two GPUs."""
    machine = {"cpu_model": "some CPU", "cpus": 2, "gpus": ["NVIDIA H200"] * 2, "ranks": 2}
    return {"machine": machine, "commit": "abc", "command": "kccl bench", "rows": list(rows)}
