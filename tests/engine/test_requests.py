"""How requests and engines end: Ctrl-C, close(), a rank that fails. Nothing works on afterwards."""

import _thread
import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest

import kccl
from kccl.engine import Engine, SamplingParams, api, placement
from kccl.engine.executors.core import ffi, lib
from kccl.engine.executors.host import HostExecutor
from kccl.engine.random_weights import random_checkpoint

IDS = [1, 2, 3]


@pytest.fixture
def engine():
    with Engine(random_checkpoint("tiny-laneformer", context=4096), ranks=2, blocks=1) as engine:
        yield engine


def threads_of_kccl():
    return [each.name for each in threading.enumerate() if each.name.startswith("kccl")]


# ---- Requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt, kccl.Error])
def test_a_wait_that_raises_leaves_no_rank_at_work(engine, monkeypatch, rank, error):
    expected = engine.logits(IDS)
    wait, others = HostExecutor.wait, []

    def raise_at_rank(executor):
        if executor is engine._ranks.mine[rank]:
            others.append(executor)
            raise error("told")
        return wait(executor)

    calls = (
        lambda: engine.logits([1] * 4000),
        lambda: engine.run_until([1] * 4000, 5),
        lambda: engine.bandwidth(),
    )
    monkeypatch.setattr(HostExecutor, "wait", raise_at_rank)
    for call in calls:
        with pytest.raises(error, match="told"):
            call()
        for each in engine._ranks.mine:
            assert lib.kccl_engine_next(each._engine, ffi.new("KcclEngineToken *"), 0) == -1
    monkeypatch.undo()
    assert len(others) == 3
    assert (engine.logits(IDS) == expected).all()


def test_ctrl_c_at_the_end_of_a_request_waits_on(engine, monkeypatch):
    end, told = HostExecutor.end, []

    def interrupted_once(executor):
        if not told:
            told.append(1)
            raise KeyboardInterrupt
        end(executor)

    monkeypatch.setattr(HostExecutor, "end", interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        engine.logits(IDS)
    for each in engine._ranks.mine:
        assert lib.kccl_engine_next(each._engine, ffi.new("KcclEngineToken *"), 0) == -1


def took(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began


def test_long_requests_are_cancelled_within_a_few_positions(monkeypatch):
    """Prefill, logits and an op's outputs: each takes a small part of its whole time."""
    checkpoint = random_checkpoint("tiny-llama", context=4096, hidden=576, ffn=1536)
    prompt = [1] * 1000
    with Engine(checkpoint, ranks=3, blocks=1) as engine:
        whole = took(lambda: engine.generate(prompt, max_tokens=1))

        def interrupt(executor):
            raise KeyboardInterrupt

        monkeypatch.setattr(HostExecutor, "wait", interrupt)
        monkeypatch.setattr(HostExecutor, "tokens", interrupt)
        # Another first id: nothing is cached.
        other = [2] * 1000
        calls = (
            lambda: engine.generate(other, max_tokens=1),
            lambda: engine.logits(other),
            lambda: engine.run_until(other, 12),
        )
        for call in calls:

            def ended(call=call):
                with pytest.raises(KeyboardInterrupt):
                    call()

            assert took(ended) < whole / 3


def test_a_start_in_the_midst_of_a_request_is_refused(engine):
    pieces = engine.stream(IDS, max_tokens=4000)
    next(pieces)
    (rank, *_) = engine._ranks.mine
    with pytest.raises(kccl.Error, match="rank 0 still works on the request before"):
        rank.start(IDS, SamplingParams())
    pieces.close()
    assert len(engine.generate(IDS, max_tokens=5).ids) == 5


def test_an_answer_that_was_given_up_stays_cached(engine):
    pieces = engine.stream(IDS, max_tokens=4000)
    found = [next(pieces).id for _ in range(5)]
    pieces.close()
    assert engine._cached == [*IDS, *found[:4]]
    expected = engine.generate(IDS, max_tokens=30).ids
    assert found == expected[:5]
    assert engine.generate([*IDS, *found], max_tokens=25).ids == expected[5:]


# ---- close() -----------------------------------------------------------------------------------


def test_close_ends_an_open_answer():
    for taken in (0, 1, 5):
        engine = Engine(random_checkpoint("tiny-llama", context=128), ranks=2, blocks=1)
        pieces = engine.stream(IDS, max_tokens=100)
        for _ in range(taken):
            next(pieces)
        engine.close()
        engine.close()
        with pytest.raises(kccl.Error, match="the engine is closed"):
            next(pieces)
        pieces.close()
        with pytest.raises(kccl.Error, match="the engine is closed"):
            engine.bandwidth()
        assert threads_of_kccl() == []


def test_an_iterator_may_outlive_its_engine():
    """In a process of its own, because a use after free ends it."""
    program = """
    from kccl.engine import Engine
    from kccl.engine.random_weights import random_checkpoint

    engine = Engine(random_checkpoint("tiny-llama"), blocks=1)
    pieces = engine.stream([1], max_tokens=100)
    next(pieces)
    engine.close()
    del pieces
    print("ended")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


def test_close_from_another_thread_ends_a_request(engine):
    errors = []

    def score():
        try:
            while True:
                engine.logits([1] * 2000)
        except kccl.Error as error:
            errors.append(str(error))

    thread = threading.Thread(target=score)
    thread.start()
    time.sleep(0.2)
    engine.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(errors) == 1


# ---- Engines that cannot open ------------------------------------------------------------------


def test_threads_that_cannot_start_are_an_error():
    program = """
    import resource

    import kccl
    from kccl.engine import Engine
    from kccl.engine.random_weights import random_checkpoint

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
    make = api.HostExecutor

    class Huge(make):
        def _make_model(self):
            model = super()._make_model()
            model.context = 2**31 - 1
            return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "HostExecutor", Huge)
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

    monkeypatch.setattr(api, "HostExecutor", Failing)
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


# ---- Processes ---------------------------------------------------------------------------------

RANK = """
import os, time
import kccl
from kccl.engine import Engine
from kccl.engine.random_weights import random_checkpoint

checkpoint = random_checkpoint("tiny-laneformer", context=4096)
"""


def run_ranks(body, number=2, timeout=5):
    program = RANK + textwrap.dedent(body)
    command = [sys.executable, "-m", "kccl", "run", "-n", str(number), "--"]
    return subprocess.run(
        [*command, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"KCCL_TIMEOUT": str(timeout)},
    )


def test_ranks_that_know_of_other_positions_begin_together():
    body = """
    with Engine(checkpoint, blocks=1) as engine:
        pieces = engine.stream([1, 2, 3], max_tokens=20)
        ids = [next(pieces).id for _ in range(5)]
        if engine.rank == 0:
            ids += [piece.id for piece in pieces]
        else:
            time.sleep(0.5)
            pieces.close()
        again = engine.generate([1, 2, 3, *ids[:5]], max_tokens=15).ids
        if engine.rank == 0:
            assert ids[5:] == again
            print("equal")
    """
    done = run_ranks(body)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def test_processes_have_each_their_logits_and_end_together():
    body = """
    with Engine(checkpoint, blocks=1) as engine:
        logits = engine.logits([1, 2, 3])
        text = logits.tobytes().hex()
        assert engine.of_rank_0(text) == text
        # A rank that stops early ends the request of all.
        try:
            for number, piece in enumerate(engine.stream([1, 2, 3], max_tokens=4000)):
                if engine.rank == 1 and number == 20:
                    break
            else:
                print("went on")
        except kccl.Error as error:
            print(error)
        assert (engine.logits([1, 2, 3]) == logits).all()
    """
    done = run_ranks(body)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "another rank ended the request before its end\n"


@pytest.mark.parametrize(
    ("given", "name"), [("blocks=1 + rank", "blocks"), ("context=100 + rank", "context")]
)
def test_ranks_with_different_engines_are_told(given, name):
    body = f"""
    rank = int(os.environ["KCCL_RANK"])
    Engine(checkpoint, {given})
    """
    done = run_ranks(body)
    assert done.returncode != 0
    assert f"{name} differs between the ranks, must be the same on all" in done.stderr


def test_uneven_cores_are_no_obstacle():
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("this machine has one core")
    body = f"""
    rank = int(os.environ["KCCL_RANK"])
    os.sched_setaffinity(0, {{{cores[0]}}} if rank else {{{cores[0]}, {cores[1]}}})
    with Engine(checkpoint) as engine:
        if len(engine.generate([1, 2, 3], max_tokens=5).ids) == 5 and rank == 0:
            print("answered")
    """
    done = run_ranks(body)
    assert (done.returncode, done.stdout) == (0, "answered\n"), done.stderr


def test_a_rank_that_stops_is_named_with_the_step():
    body = """
    with Engine(checkpoint, blocks=1) as engine:
        if engine.rank == 0:
            engine.logits([1])
        else:
            # Makes the same request, and never begins it.
            engine._ranks._agree("logits [1]", 0)
            time.sleep(3)
    """
    # The limit of the first call, which is 300 s, is over when the engine is open.
    done = run_ranks(body, timeout=1)
    assert done.returncode != 0
    assert "decoding on rank 0: block 0 of rank 1 did not arrive; rank 0 waited for" in done.stderr
    assert "step seen 0, wanted" in done.stderr and "; open a new Engine" in done.stderr
