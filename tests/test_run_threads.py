"""run_threads: a rank that raises ends the others, and its error is the one that is raised."""

import time

import numpy as np
import pytest

import kccl


def meet(comm):
    """After two calls the limit of the first contact does not count any more."""
    for _ in range(2):
        comm.barrier()


def test_results_in_rank_order():
    assert kccl.run_threads(lambda comm: (comm.rank, comm.world_size), 3) == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


@pytest.mark.parametrize("world_size", [0, 9, -1])
def test_world_size(world_size):
    with pytest.raises(
        kccl.InvalidArgument, match=f"world_size is {world_size}, must be between 1"
    ):
        kccl.run_threads(lambda comm: None, world_size)


class Mishap(Exception):
    pass


@pytest.mark.parametrize(
    "where",
    [
        "first call",
        "later",
        "window",
        "wait",
        pytest.param(
            "inside with",
            marks=pytest.mark.xfail(
                reason="a race: the others may see close() before the error is kept"
            ),
        ),
    ],
)
def test_a_rank_raises(where):
    """The others end at once, whatever they wait in, and its error is the one that is raised."""

    def main(comm):
        if where != "first call":
            meet(comm)
        if comm.rank == 1:
            time.sleep(0.03)
            if where == "inside with":
                with comm:
                    raise Mishap
            raise Mishap
        if where == "wait":
            comm.wait(peer=1 if comm.rank else None)
        elif where == "window":
            comm.window(64)
        else:
            for _ in range(3):
                comm.all_reduce(np.ones(3000), channel=2)

    started = time.perf_counter()
    with pytest.raises(Mishap):
        kccl.run_threads(main, 3, timeout=3)
    assert time.perf_counter() - started < 1


@pytest.mark.xfail(strict=True, reason="only the whole communicator is told")
def test_a_rank_raises_while_others_use_a_part():
    """The other ranks are in calls of a communicator that the failing rank has split off."""

    def main(comm):
        meet(comm)
        part = comm.split(0)
        part.timeout = 2
        part.barrier()
        part.barrier()
        if comm.rank == 1:
            raise Mishap
        part.barrier()

    started = time.perf_counter()
    with pytest.raises(Mishap):
        kccl.run_threads(main, 2)
    assert time.perf_counter() - started < 1
