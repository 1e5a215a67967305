"""The benchmarks check before they time, and measure what they say."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from bench_world import (
    Broken,
    FakeCollective,
    FakeComm,
    FakeWorld,
    off_by_one,
    parse,
    probes,  # noqa: F401  # a fixture, asked for by name
    problem,
    row,
)

import kccl
from kccl.bench import cli, collectives
from kccl.bench.harness import collective, data, measure, report
from kccl.bench.host.side import Floors
from kccl.tools import probe

# Sizes and factors


@pytest.mark.parametrize(
    ("text", "nbytes"), [("8", 8), ("4k", 4096), ("64K", 65536), ("1M", 1 << 20), ("2GB", 2 << 30)]
)
def test_sizes_are_read_as_nccl_tests_writes_them(text: str, nbytes: int) -> None:
    assert collective.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "K", "-8", "1.5K", "9x"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        collective.parse_size(text)


def test_sweep_ends_at_or_below_the_last_size() -> None:
    assert collective.sweep(8, 100, 2) == [8, 16, 32, 64]
    assert collective.sweep(8, 8, 2) == [8]


@pytest.mark.parametrize(("begin", "end", "factor"), [(16, 8, 2), (0, 8, 2), (8, 64, 1)])
def test_a_sweep_that_is_empty_or_endless_is_refused(begin: int, end: int, factor: int) -> None:
    with pytest.raises(ValueError):
        collective.sweep(begin, end, factor)


def test_sizes_become_whole_elements_once() -> None:
    table = collectives.load("all_reduce")
    common = {"dtype": "float64", "np_dtype": np.dtype(np.float64), "op": "sum", "root": 0}
    found = table.problems([1, 8, 9, 20], **common, in_place=True, world_size=2)
    assert [(each.nbytes, each.count) for each in found] == [(8, 1), (16, 2)]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_sizes_become_whole_chunks(name: str) -> None:
    """As in nccl-tests, a size is that of all ranks' chunks together."""
    common = {"dtype": "float32", "np_dtype": np.dtype(np.float32), "op": "sum", "root": 0}
    found = collectives.load(name).problems([1, 12, 32, 50], **common, in_place=True, world_size=3)
    assert [(each.nbytes, each.count) for each in found] == [(12, 3), (24, 6), (48, 12)]
    assert [found[1].chunk(rank) for rank in range(3)] == [slice(0, 2), slice(2, 4), slice(4, 6)]


def test_bandwidth_factors_are_nccl_tests() -> None:
    assert collectives.load("all_reduce").busbw_factor(4) == pytest.approx(1.5)
    assert collectives.load("all_reduce").busbw_factor(1) == 0
    assert collectives.load("reduce_scatter").busbw_factor(4) == pytest.approx(0.75)
    assert collectives.load("all_gather").busbw_factor(4) == pytest.approx(0.75)
    assert collectives.load("broadcast").busbw_factor(4) == 1
    assert collectives.load("barrier").busbw_factor(4) is None


# Inputs and oracle


DTYPES = ("float64", "float32", "float16", "bfloat16", "int32", "int64")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "prod", "min", "max"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_results_are_exact_in_any_order_in_the_element_type(dtype: str, op: str, n: int) -> None:
    asked = problem(dtype, op, count=257, n=n)
    steps = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
    for order in (range(n), reversed(range(n))):
        total = None
        for rank in order:
            mine = data.make_input(asked, rank, 5)
            total = mine if total is None else steps[op](total, mine)
        assert total.dtype == asked.np_dtype
        assert data.count_wrong(total, data.reduced(asked, 5)) == 0


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8])
def test_averages_are_exact(n: int) -> None:
    asked = problem("bfloat16", "avg", n=n)
    inputs = [data.make_input(asked, rank, 1).astype(np.float64) for rank in range(n)]
    assert np.array_equal(sum(inputs) / n, data.reduced(asked, 1).astype(np.float64))
    assert n == 1 or not np.array_equal(inputs[0], inputs[-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_depend_on_seed_rank_and_index(dtype: str) -> None:
    asked = problem(dtype)
    mine = data.make_input(asked, 0, 1)
    assert data.count_wrong(mine, data.make_input(asked, 0, 1)) == 0
    assert data.count_wrong(mine, data.make_input(asked, 1, 1)) > 32
    assert data.count_wrong(mine, data.make_input(asked, 0, 2)) > 32
    assert data.count_wrong(mine, np.roll(mine, 1)) > 32


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_a_long_message_repeats_but_not_at_powers_of_two(op: str) -> None:
    asked = replace(problem("bfloat16", op), count=(1 << 21) + 5)
    inputs = [data.make_input(asked, rank, 1) for rank in range(asked.world_size)]
    total = sum(each.astype(np.float64) for each in inputs)
    wanted = total / (asked.world_size if op == "avg" else 1)
    assert np.array_equal(wanted, data.reduced(asked, 1).astype(np.float64))
    for shift in (1, 4096, 1 << 20):
        assert data.count_wrong(inputs[0], np.roll(inputs[0], shift)) > asked.count // 2
    # One wrong element is found at any index.
    for place in (0, asked.count // 2, asked.count - 1):
        wrong = inputs[0].copy()
        wrong[place] += 1
        assert data.count_wrong(wrong, inputs[0]) == 1


def test_comparison_is_by_bits() -> None:
    zeros = np.zeros(4, np.float32)
    assert data.count_wrong(-zeros, zeros) == 4
    assert data.count_wrong(np.full(4, np.nan, np.float32), np.full(4, np.nan, np.float32)) == 0


# A wrong result


def last_element(result: np.ndarray, rank: int) -> None:
    if rank == 1:
        result[-1] += 1


@pytest.mark.parametrize("broken", [off_by_one, last_element])
@pytest.mark.usefixtures("probes")
def test_a_wrong_result_has_no_time_and_the_exit_code_says_so(
    broken: Broken, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse("all_reduce", "-b", "64", "-e", "64", "--json")
    assert FakeWorld(2, broken).run(partial(cli.main, args)) == [1, 1]
    printed = capsys.readouterr()
    rows = json.loads(printed.out)["rows"]
    assert len(rows) == 3
    for each in rows:
        assert each["wrong"] > 0
        timed = ("time_us", "p99_us", "skew_us", "algbw_gbps", "busbw_gbps")
        assert all(each[key] is None for key in timed)
    assert "FAILED" in printed.err


@pytest.mark.usefixtures("probes")
def test_a_result_that_becomes_wrong_while_timed_has_no_time() -> None:
    calls = [0, 0]

    def late(result: np.ndarray, rank: int) -> None:
        calls[rank] += 1
        if calls[rank] > 10:
            result[0] += 1

    rows = FakeWorld(2, late).run(lambda comm: measured(comm, "all_reduce"))[0]
    assert all(each["wrong"] > 0 and each["time_us"] is None for each in rows)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_chunks_that_are_not_moved_are_wrong(name: str, in_place: bool) -> None:
    """Buffers that the call leaves as they were are not right by chance."""

    def main(comm: FakeComm) -> tuple[list[measure.Row], list[measure.Row]]:
        right = measured(comm, name, in_place=in_place)
        setattr(comm, name, FakeCollective(name, lambda x, out, **_: None))
        return right, measured(comm, name, in_place=in_place)

    right, wrong = FakeWorld(2).run(main)[0]
    assert all(each["wrong"] == 0 for each in right)
    assert all(each["wrong"] > 0 for each in wrong)


def test_a_barrier_that_lets_ranks_through_is_wrong() -> None:
    def main(comm: FakeComm) -> list[measure.Row]:
        comm.barrier = FakeCollective("barrier", lambda: None)
        return measured(comm, "barrier")

    assert all(each["wrong"] >= 1 for each in FakeWorld(2).run(main)[0])


# Rows


def measured(comm: FakeComm, name: str, *, in_place: bool = True) -> list[measure.Row]:
    table = collectives.load(name)
    common = {"dtype": "float32", "np_dtype": np.dtype(np.float32), "op": "sum", "root": 1}
    asked = table.problems([64], **common, in_place=in_place, world_size=comm.world_size)[0]
    return measure.measure(
        table,
        asked,
        measure.kccl_contenders(comm, table, asked),
        rank=comm.rank,
        gather=comm.gather_objects,
        repeats=2,
        iterations=4,
    )


@pytest.mark.parametrize("name", collectives.callable_outside_kernels())
def test_rows_are_the_same_on_every_rank_and_follow_the_schema(name: str) -> None:
    first, second = FakeWorld(2).run(lambda comm: measured(comm, name))
    assert first == second
    assert [(each["mode"], each["call"]) for each in first] == [
        ("host", "prepared"),
        ("eager", "prepared"),
        ("eager", "direct"),
    ]
    for each in first:
        assert tuple(each) == measure.COLUMNS
        assert each["wrong"] == 0
        assert each["time_us"] > 0
        assert 0 <= each["skew_us"] <= each["time_us"]
        assert (each["busbw_gbps"] is None) == (name == "barrier")


def test_the_slowest_rank_of_each_repeat_counts() -> None:
    table = collectives.load("all_reduce")
    empty = row(time_us=None, bytes=4000, world_size=4)
    medians_us = np.array([[1.0, 9.0, 2.0], [4.0, 1.0, 1.0]])
    measure._fill_times(empty, table, medians_us, 10.0)
    assert empty["time_us"] == 4.0
    assert empty["skew_us"] == 3.0
    assert empty["algbw_gbps"] == pytest.approx(1.0)
    assert empty["busbw_gbps"] == pytest.approx(1.5)


def test_floors_are_the_way_plus_the_copy() -> None:
    rows = [row(bytes=0), row(bytes=8), row(bytes=8, library="openmpi", floor_us=None)]
    measure.add_floors(rows, 0.25, {0: 0.0, 8: 0.5})
    assert [each["floor_us"] for each in rows] == [0.25, 0.75, 0.75]


def test_repeats_alternate_over_the_contenders() -> None:
    log: list[str] = []

    def main(comm: FakeComm) -> None:
        table = collectives.load("broadcast")
        asked = replace(problem(n=1), collective="broadcast", root=0)
        contenders = [
            replace(each, enter=partial(log.append, str(i)))
            for i, each in enumerate(measure.kccl_contenders(comm, table, asked))
        ]
        common = {"rank": 0, "gather": comm.gather_objects}
        measure.measure(table, asked, contenders, **common, repeats=3, iterations=2)

    FakeWorld(1).run(main)
    assert "".join(log) == "012" + "012" + "210" + "012" + "012"


def test_best_peer_is_of_the_same_problem_and_mode() -> None:
    peers = [
        row(library="mpich", time_us=3.0),
        row(library="openmpi", time_us=2.0),
        row(library="openmpi", time_us=0.1, bytes=16),
        row(library="openmpi", time_us=None, wrong=1),
    ]
    assert report.best_peer(peers, row()) == 2.0
    assert report.best_peer(peers, row(mode="host")) is None


def test_a_disturbed_probe_raises_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another batch's copies nor those of a longer message may be faster than a floor."""
    floors = Floors(one_ways_us=[0.3, 0.1], copies_us={8: 5.0, 64: 1.0, 128: 2.0})
    rows = [row(bytes=nbytes) for nbytes in (8, 64, 128)]
    floors.add(rows)
    assert [each["floor_us"] for each in rows] == pytest.approx([1.1, 1.1, 2.1])

    copies = iter([9.0, 3.0, 7.0, 3.5, 8.0])

    def host_copy(to: Any, source: Any, nbytes: int, iterations: int, us: Any) -> None:
        us[0:iterations] = [next(copies)] * iterations

    monkeypatch.setattr(probe, "lib", SimpleNamespace(kccl_host_copy=host_copy))
    assert kccl.run_threads(lambda comm: probe.copy_us(comm, 1 << 20), 1) == [3.0]
