"""The rows of calls between two ranks, put, get, signal and send_recv, and MPI's ways of them."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from long import long_after

import kccl
from kccl.bench import cli, collectives
from kccl.bench.harness import measure
from kccl.bench.harness import problem as bench_problem

NAMES = ("put", "get", "send_recv", "signal")


def problem(name, world_size, nbytes=64):
    table = collectives.load(name)
    (found,) = table.problems(
        [nbytes],
        dtype="float32",
        np_dtype=np.dtype(np.float32),
        op="sum",
        root=0,
        in_place=True,
        world_size=world_size,
    )
    return table, found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rows_of_kccl(name, world_size):
    def main(comm):
        table, asked = problem(name, world_size)
        return measure.measure(
            table,
            asked,
            measure.kccl_contenders(comm, table, asked),
            rank=comm.rank,
            gather=comm.gather_objects,
            repeats=2,
            iterations=4,
        )

    rows = kccl.run_threads(main, world_size)
    assert all(each == rows[0] for each in rows)
    assert [(row["mode"], row["call"]) for row in rows[0]] == [
        ("eager", "prepared"),
        ("eager", "direct"),
    ]
    for row in rows[0]:
        assert row["algorithm"] == name and row["wrong"] == 0 and row["time_us"] > 0


@pytest.mark.parametrize("name", ["get", "put", "send_recv"])
@pytest.mark.parametrize("lost", ["data", "order"])
def test_wrong_data_is_counted(name, lost):
    def main(comm):
        table, asked = problem(name, 2)
        mine = bench_problem.buffers(asked)
        call = table.direct(comm, mine, asked)

        def spoiled():
            # put and get return the array that they have received; send_recv has an output.
            found = mine.out if table.is_apart else call()
            if table.is_apart:
                call()
            if comm.rank == 1:
                found[:] = found * 2 if lost == "data" else np.roll(found, 1)
            return found

        return table.check(asked, mine, spoiled, comm.rank, comm.gather_objects, 1)

    right, wrong = kccl.run_threads(main, 2)
    assert right == 0 and wrong > 0


def test_a_rank_that_does_not_wait_for_its_partner_is_counted():
    def main(comm):
        table, asked = problem("signal", 2)
        mine = bench_problem.buffers(asked)
        return table.check(asked, mine, lambda: None, comm.rank, comm.gather_objects, 3)

    # The first of two that do not wait leaves before the other arrives.
    assert sum(kccl.run_threads(main, 2)) == 1


@pytest.mark.parametrize("name", NAMES)
def test_they_have_no_rows_in_kernels_and_those_with_windows_none_on_gpus(name, capsys):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    refused = [(["--in-kernel", "--backend", "sim"], "has no rows inside kernels")]
    if name != "send_recv":
        refused.append((["--backend", "cuda"], "has rows on the host and the simulator only"))

    def main(comm):
        for options, why in refused:
            assert cli.main(parser.parse_args([name, *options]), comm) == 2
            assert f"{name} {why}" in capsys.readouterr().err

    kccl.run_threads(main, 1)


@pytest.mark.parametrize(
    ("name", "second"),
    long_after(
        1,
        [
            *(("put", "put_fence"), ("get", "get_fence"), ("signal", "fence")),
            ("send_recv", "persistent"),
        ],
    ),
)
def test_mpis_rows(name, second):
    pytest.importorskip("mpi4py")
    done = subprocess.run(
        [
            *(Path(sys.executable).with_name("mpirun"), "-n", "2", sys.executable),
            *("-m", "kccl", "bench", name, "--baselines", "--json"),
            *([] if name == "signal" else ["--sizes", "64"]),
            *("--repeats", "1", "--iterations", "5"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    rows = json.loads(done.stdout.splitlines()[-1])["rows"]
    found = {(row["library"], row["algorithm"]) for row in rows}
    assert {("kccl", name), ("mpich", "sendrecv"), ("mpich", second)} <= found
    assert all(row["wrong"] == 0 and row["floor_us"] > 0 for row in rows)


@pytest.mark.parametrize("rival", ["sendrecv", "get_fence"])
def test_mpi_sends_data_that_are_new_in_each_call_as_get_does(rival):
    """Data that stay are in the receiver's cache from the call before: nothing would be moved."""
    sent = []

    class Window:
        def Fence(self):
            sent.append(memory.copy())

        def Get(self, found, partner, slot):
            pass

        def Free(self):
            pass

        def tomemory(self):
            return memory

    class Comm:
        rank, size = 0, 2

        def Sendrecv(self, x, *_):
            sent.append(x.copy())
            x[:] = 0  # the next call writes it again

    class Mpi:
        class Win:
            @staticmethod
            def Allocate(*_, **__):
                return Window()

    table, asked = problem("get", 2)
    memory = np.zeros(2 * asked.nbytes // 4, np.float32)
    mine = bench_problem.buffers(asked)
    make = table.mpi if rival == "sendrecv" else table.mpi_others[rival]
    call = make(Mpi, Comm(), mine, asked)
    for value in (3, 5):
        mine.x[:] = value
        del sent[:]
        call()
        assert (sent[0] == value).any(), sent
        assert (mine.x == value).all()
