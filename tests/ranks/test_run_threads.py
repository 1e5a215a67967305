"""run_threads: results by rank; a rank that raises ends the others, and its error is raised."""

import signal
import threading
import time

import numpy as np
import pytest
from ranks import AT_ONCE

import kccl


def meet(comm):
    """After two calls the longer time-out of first calls no longer applies."""
    for _ in range(2):
        comm.barrier()


def test_results_in_rank_order():
    assert kccl.run_threads(lambda comm: (comm.rank, comm.world_size), 3) == [
        (0, 3),
        (1, 3),
        (2, 3),
    ]


@pytest.mark.parametrize("world_size", [0, 65, -1])
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
        "inside with",
    ],
)
def test_a_rank_raises(where):
    """The others end at once, whatever they wait for, and its error is the one that is raised."""

    def main(comm):
        if where != "first call":
            meet(comm)
        if comm.rank == 1:
            time.sleep(0.03)
            if where == "inside with":
                try:
                    with comm:
                        raise Mishap
                finally:
                    # The others fail before this rank's error is known.
                    time.sleep(0.1)
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
        kccl.run_threads(main, 3, timeout=20)
    assert time.perf_counter() - started < AT_ONCE


def use_part(comm, part):
    part.barrier()


def use_part_of_part(comm, part):
    finer = part.split(0)
    finer.barrier()


def allocate_in_part(comm, part):
    part.window(64)


@pytest.mark.parametrize("use", [use_part, use_part_of_part, allocate_in_part])
def test_a_rank_raises_while_others_use_a_part(use):
    """The others wait in calls of a communicator that split() made."""

    def main(comm):
        part = comm.split(0)
        use(comm, part)
        if comm.rank == 1:
            raise Mishap
        use(comm, part)

    started = time.perf_counter()
    with pytest.raises(Mishap):
        kccl.run_threads(main, 2)
    assert time.perf_counter() - started < AT_ONCE


def test_an_exception_inside_with_reaches_the_others():
    """Their error says that it was no ordinary close, even if they wait for another rank."""
    failed = threading.Event()

    def main(comm):
        meet(comm)
        if comm.rank == 1:
            with pytest.raises(Mishap), comm:
                raise Mishap
            assert failed.wait(5)
        elif comm.rank == 0:
            with pytest.raises(kccl.PeerLost, match=r"rank 1 gave up .*: an exception ended"):
                comm.wait(peer=2)
            failed.set()
        else:
            assert failed.wait(5)

    kccl.run_threads(main, 3)


@pytest.mark.parametrize("where", ["call", "part", "window"])
def test_interrupt(where):
    """Only the main thread receives Ctrl-C, and the waits of all ranks end."""

    def main(comm):
        part = comm.split(0)
        if comm.rank == 0:
            main_thread = threading.main_thread().ident
            threading.Timer(0.1, signal.pthread_kill, [main_thread, signal.SIGINT]).start()
            {"call": comm.wait, "part": part.wait, "window": lambda: comm.window(64)}[where]()
        else:
            part.wait(peer=0)

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        kccl.run_threads(main, 2)
    assert time.perf_counter() - started < AT_ONCE
