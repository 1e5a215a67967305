"""Where a bench puts its ranks, what it says about that, and what it leaves behind."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_world import (
    FakeComm,
    FakeWorld,
    parse,
    probes,  # noqa: F401  # a fixture, asked for by name
    problem,
)

from kccl.bench import cli, collectives, compare
from kccl.bench.harness import clock, document, measure
from kccl.bench.host import places
from kccl.bench.host.side import HostSide
from kccl.topology.pinning import assign

ALLOWED = sorted(os.sched_getaffinity(0))
needs_two = pytest.mark.skipif(len(ALLOWED) < 2, reason="there is one core")


@pytest.mark.parametrize(
    ("allowed", "siblings", "cpus"),
    [
        # One core each, in the order of the cores.
        ([{0, 1}, {0, 1}], 1, [0, 1]),
        ([{0, 1, 2, 3}] * 3, 1, [0, 1, 2]),
        # No two on the threads of one core, while there is another core.
        ([set(range(8))] * 4, 2, [0, 2, 4, 6]),
        # As many as have a core of their own by any assignment.
        ([{0, 1}, {0}], 1, [1, 0]),
        ([{0, 1}, {1, 2}, {0}], 1, [1, 2, 0]),
        # A launcher has put each on its core.
        ([{3}, {2}], 1, [3, 2]),
        # More ranks than cores: evenly, and on the threads of a core one by one.
        ([{0, 1}] * 4, 1, [0, 1, 0, 1]),
        ([{0, 1, 2, 3}] * 4, 2, [0, 2, 1, 3]),
        ([{5}, {5}], 1, [5, 5]),
    ],
)
def test_ranks_have_a_core_each_where_that_is_possible(
    allowed: list[set[int]], siblings: int, cpus: list[int]
) -> None:
    assert assign(allowed, lambda cpu: cpu // siblings * siblings) == cpus


@pytest.mark.parametrize(
    ("cpus", "allowed", "meet"),
    [
        ([0, 0], [0], True),
        ([0, 1, 0], [0, 1], False),
        ([1, 1, 0], [0, 1], True),
        ([None, None], [0], True),
        ([None, None], [0, 1], False),
        ([0], [0], False),
    ],
)
def test_the_scheduler_has_no_floor(cpus: list[int | None], allowed: list[int], meet: bool) -> None:
    """A ping-pong of ranks on one CPU takes half a minute, and says nothing of the machine."""
    found = places.Places([0] * len(cpus), cpus, allowed, "", int)
    assert found.first_two_meet == meet
    side = HostSide(
        FakeComm(FakeWorld(len(cpus)), 0),
        collectives.load("all_reduce"),
        has_baselines=False,
        places=found,
    )
    assert side._has_floor == (not meet)


def where(comm: FakeComm, *, pins: bool = True) -> Any:
    before = os.sched_getaffinity(0)
    with places.placed(comm, pins=pins) as found:
        inside = os.sched_getaffinity(0)
        with found.lifted():
            lifted = os.sched_getaffinity(0)
    assert os.sched_getaffinity(0) == before
    return found, inside, lifted


@needs_two
def test_each_rank_is_pinned_and_freed_again() -> None:
    for rank, (found, inside, lifted) in enumerate(FakeWorld(2).run(where)):
        assert inside == {found.cpus[rank]} and len(set(found.cpus)) == 2
        assert sorted(lifted) == ALLOWED
        assert found.note == ""
        assert found.lines()[rank] == f"# rank {rank}  pid {os.getpid()}  core {found.cpus[rank]}"


def test_without_pins_ranks_are_anywhere() -> None:
    for found, inside, _ in FakeWorld(2).run(partial(where, pins=False)):
        assert sorted(inside) == ALLOWED
        assert list(found.cpus) == [None, None]
        assert found.lines()[1].endswith("any core")


def test_more_ranks_than_cores_are_said_so() -> None:
    found, *_ = FakeWorld(len(ALLOWED) + 1).run(where)[0]
    assert f"{len(ALLOWED) + 1} ranks share {len(ALLOWED)} core" in found.note


def test_a_system_that_forbids_pinning_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    for found, inside, _ in FakeWorld(2).run(where):
        assert "are not pinned, so two may meet on one core: rank 0: sched_seta" in found.note
        assert list(found.cpus) == [None, None] and sorted(inside) == ALLOWED


def rows_of(comm: FakeComm, cpus: list[list[int]], taken: float = 0.0) -> list[measure.Row]:
    """Rows of contenders that say they ran on these CPUs, by rank one for each sample."""
    table, asked = collectives.load("all_reduce"), problem(n=comm.world_size)
    samples, began = iter(cpus[comm.rank]), time.perf_counter()
    contender = measure.Contender(
        *("kccl", "some", "host", "prepared", measure.buffers(asked), lambda: None),
        lambda iterations, warmup: (np.ones(1), np.ones(1)),
        check=lambda seed: 0,
        cpu=lambda: next(samples),
        waited=lambda: (time.perf_counter() - began) * taken,
    )
    common = {"rank": comm.rank, "gather": comm.gather_objects, "repeats": 2, "iterations": 2}
    return measure.measure(table, asked, [contender], **common, core_of=lambda cpu: cpu // 2)


@pytest.mark.parametrize(
    ("cpus", "notes"),
    [
        ([[0, 0, 0, 0], [2, 2, 2, 2]], []),
        ([[0, 0, 0, 0], [2, 0, 2, 2]], ["shared_core"]),
        # The two threads of one core.
        ([[0, 0, 0, 0], [2, 2, 2, 1]], ["shared_core"]),
        # They changed places between two repeats.
        ([[0, 0, 2, 2], [2, 2, 0, 0]], []),
    ],
)
def test_rows_of_ranks_that_met_on_a_core_are_marked(
    cpus: list[list[int]], notes: list[str]
) -> None:
    for (row,) in FakeWorld(2).run(partial(rows_of, cpus=cpus)):
        assert row["notes"] == notes


@pytest.mark.parametrize(("taken", "notes"), [(0.01, []), (0.3, ["busy"])])
def test_rows_of_ranks_whose_core_others_had_are_marked(taken: float, notes: list[str]) -> None:
    """Not those from which a sleeper that wakes took microseconds."""
    apart = [[0] * 4, [2] * 4]
    for (row,) in FakeWorld(2).run(partial(rows_of, cpus=apart, taken=taken)):
        assert row["notes"] == notes


def test_a_process_that_works_on_the_same_core_is_seen() -> None:
    """Also beside the work of a whole test run; a process that sleeps takes no time at all."""
    before = os.sched_getaffinity(0)
    core = max(before)
    os.sched_setaffinity(0, {core})
    try:
        with subprocess.Popen(
            [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
        ) as worker:
            assert worker.stdout is not None
            worker.stdout.readline()
            waited, began = clock.waited_s(), time.perf_counter()
            while time.perf_counter() - began < 0.5:
                pass
            share = (clock.waited_s() - waited) / (time.perf_counter() - began)
            worker.kill()
    finally:
        os.sched_setaffinity(0, before)
    if not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("the kernel does not count it")
    assert share > measure.BUSY_SHARE


def test_rows_below_their_floor_and_of_a_floor_that_changed_are_marked() -> None:
    from bench_world import row

    rows = [row(bytes=8, time_us=1.0), row(bytes=16, time_us=0.1)]
    for _ in range(2):  # while floors come in, they are set again and again
        around = {8: (0.2, 0.4), 16: (0.2, 0.2)}
        measure.add_floors(rows, 0.2, {8: 0.0, 16: 0.0}, around)
    assert [each["notes"] for each in rows] == [["drift"], ["below_floor"]]


def test_a_row_has_the_least_the_mean_and_the_most_of_the_ranks() -> None:
    from bench_world import row

    made = row(notes=[])
    medians_us = np.array([[1.0, 1.0, 9.0, 1.0], [4.0, 2.0, 2.0, 2.0]])
    measure._fill_times(made, collectives.load("all_reduce"), medians_us, 10.0)
    assert (made["rank_min_us"], made["rank_avg_us"], made["rank_max_us"]) == (1.0, 1.5, 2.0)
    assert (made["q1_us"], made["q3_us"]) == (2.0, 5.25)
    assert made["notes"] == ["spread"]


@needs_two
@pytest.mark.usefixtures("probes")
def test_the_head_has_rank_process_and_core(capsys: pytest.CaptureFixture[str]) -> None:
    assert FakeWorld(2).run(partial(cli.main, parse("all_reduce", "-e", "8"))) == [0, 0]
    lines = capsys.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("# rank ")]
    assert [line.split()[2] for line in heads] == ["0", "1"]
    assert all(f"pid {os.getpid()}  core " in line for line in heads)
    FakeWorld(2).run(partial(cli.main, parse("all_reduce", "-e", "8", "--no-pin")))
    assert capsys.readouterr().out.count("any core") == 2


@needs_two
def test_ranks_of_a_job_do_not_share_a_core() -> None:
    """`kccl run` starts both ranks without pins; one of them may use a single core."""
    program = (
        "import os, sys; r = int(os.environ['KCCL_RANK']); c = sorted(os.sched_getaffinity(0))"
    )
    program += "; os.sched_setaffinity(0, c[:1] if r else c)"
    program += "; from kccl.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    bench = ("bench", "all_reduce", "-e", "8", "--repeats", "2", "--iterations", "9")
    command = ("-m", "kccl", "run", "-n", "2", "--", sys.executable, "-c", program, *bench)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    heads = [line for line in done.stdout.splitlines() if line.startswith("# rank ")]
    assert [line.split()[-1] for line in heads] == [str(ALLOWED[1]), str(ALLOWED[0])]


@pytest.mark.long
@needs_two
def test_the_document_of_pinned_ranks_has_the_machine_as_it_was_before(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Documents are matched by it, with those of runs without pins too."""
    bench = ("bench", "all_reduce", "-e", "8", "--repeats", "1", "--iterations", "9", "--json")
    command = (sys.executable, "-m", "kccl", "run", "-n", "2", "--", sys.executable, "-m", "kccl")
    files = [tmp_path / "pinned", tmp_path / "not"]
    for path, flags in zip(files, [(), ("--no-pin",)], strict=True):
        with open(path, "w") as file:
            subprocess.run([*command, *bench, *flags], stdout=file, timeout=120, check=True)
        assert json.loads(path.read_text())["machine"] == document.machine(2)
    assert document.machine(2)["allowed_cpus"] == len(ALLOWED)
    compare.main(argparse.Namespace(compare=files, collective=None))
    assert "the machines differ" not in capsys.readouterr().out
