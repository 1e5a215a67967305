"""Engines that open: on which cores; and that cannot: no thread or memory of them stays."""

import _thread
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from kccl_threads import threads_of_kccl

import kccl
from kccl.engine import Engine
from kccl.engine.executors import opening, placement
from kccl.engine.executors.host import HostExecutor
from kccl.engine.files.random_weights import random_checkpoint

IDS = [1, 2, 3]


def test_threads_that_cannot_start_are_an_error():
    program = """
    import resource

    import kccl
    from kccl.engine import Engine
    from kccl.engine.files.random_weights import random_checkpoint

    checkpoint = random_checkpoint("tiny-llama")
    Engine(checkpoint, blocks=2).close()
    in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    # Room for the engine's memory, and for the stacks of some of its threads.
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (150 << 20),) * 2)
    try:
        Engine(checkpoint, blocks=64)
    except kccl.BackendError as error:
        print(error)
    Engine(checkpoint, blocks=1).close()
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("rank 0 cannot start 64 threads with 128 positions: ")
    assert "Resource temporarily unavailable" in done.stdout


def test_memory_that_is_not_there_is_an_error():
    # 200 TB of keys and values, more than an address space has.
    checkpoint = random_checkpoint("tiny-llama", context=2**31 - 1, num_layers=300)
    make = opening.HostExecutor

    class Huge(make):
        def _make_model(self):
            model = super()._make_model()
            model.context = 2**31 - 1
            return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "HostExecutor", Huge)
        with pytest.raises(kccl.BackendError, match="128 positions: Cannot allocate memory"):
            Engine(checkpoint, blocks=1, context=128)


@pytest.mark.parametrize("is_early", [True, False])
def test_a_rank_that_cannot_open_ends_all(monkeypatch, is_early):
    class Failing(HostExecutor):
        def __init__(self, checkpoint, comm, **options):
            if comm.rank == 1 and is_early:
                raise kccl.BackendError("no room")
            super().__init__(checkpoint, comm, **options)
            if comm.rank == 1:
                time.sleep(0.1)
                raise kccl.BackendError("no room")

    monkeypatch.setattr(opening, "HostExecutor", Failing)
    with pytest.raises(kccl.BackendError, match="no room"):
        Engine(random_checkpoint("tiny-llama"), ranks=3, blocks=1)
    assert threads_of_kccl() == []


def test_ctrl_c_while_the_model_is_read_ends_all():
    def interrupt(done, total):
        _thread.interrupt_main()
        time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        Engine(random_checkpoint("tiny-llama"), ranks=2, blocks=1, progress=interrupt)
    assert threads_of_kccl() == []


def test_ranks_within_a_job_are_refused(monkeypatch):
    monkeypatch.setenv("KCCL_RANK", "0")
    with pytest.raises(kccl.InvalidArgument, match="ranks is 2: they are threads of one process"):
        Engine("bundled", ranks=2)


# ---- Cores -------------------------------------------------------------------------------------


class Ranks:
    """Ranks whose launcher bound them to these cores."""

    layout = "topology"

    def __init__(self, rank, cores):
        self.rank, self._cores = rank, cores

    def gather_objects(self, value):
        assert value == self._cores[self.rank]
        return self._cores


def placed(cores, blocks=None):
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for rank, mine in enumerate(cores):
            patch.setattr(os, "sched_getaffinity", lambda _, mine=mine: set(mine))
            found.append(placement.place(Ranks(rank, cores), blocks))
    assert len({number for number, _ in found}) == 1
    return found[0][0], [list(cpus) for _, cpus in found]


def test_cores_are_shared_by_the_ranks_that_may_use_them():
    assert placed([[0, 1, 2, 3]]) == (4, [[0, 1, 2, 3]])
    assert placed([[0, 1, 2, 3]] * 2) == (2, [[0, 1], [2, 3]])
    # Bound by a launcher, evenly or not.
    assert placed([[0, 1], [2, 3]]) == (2, [[0, 1], [2, 3]])
    assert placed([[0, 1, 2], [3]]) == (1, [[0], [3]])
    assert placed([[0, 1], [0, 1], [5, 6, 7]]) == (1, [[0], [1], [5]])
    # More threads than cores.
    assert placed([[0, 1]] * 3) == (1, [[], [], []])
    assert placed([[0, 1]], blocks=3) == (3, [[]])
    assert placed([[0, 1, 2, 3]], blocks=2) == (2, [[0, 1]])


def test_a_rank_has_at_most_64_threads():
    assert placed([list(range(200))]) == (64, [list(range(64))])
    assert placed([list(range(200))] * 2)[0] == 64


def test_an_engine_opens_on_a_machine_of_many_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(100)))
    with Engine(random_checkpoint("tiny-llama")) as engine:
        assert engine.logits(IDS).shape == (3, 256)


def test_ctrl_c_while_the_ranks_start_ends_them(monkeypatch):
    """Ctrl-C comes before any rank has a communicator that could be aborted."""
    start = threading.Thread.start

    def start_and_interrupt(thread):
        start(thread)
        if thread.name == "kccl engine":
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        Engine(random_checkpoint("tiny-llama"), ranks=2, blocks=1)
    assert not threads_of_kccl()
