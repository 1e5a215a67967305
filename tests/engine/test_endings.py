"""How requests and engines end: Ctrl-C, close(), a rank that fails. Nothing works on afterwards."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest
from kccl_threads import threads_of_kccl
from long import long_beyond_each

import kccl
from kccl.engine import Engine, SamplingParams
from kccl.engine.base.core import ffi, lib
from kccl.engine.executors.host import HostExecutor
from kccl.engine.files.random_weights import random_checkpoint

IDS = [1, 2, 3]


@pytest.fixture
def engine():
    with Engine(random_checkpoint("tiny-laneformer", context=4096), ranks=2, blocks=1) as engine:
        yield engine


# ---- Requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "error"), long_beyond_each([0, 1], [KeyboardInterrupt, kccl.Error])
)
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
    assert engine._runner.prefixes.newest == [*IDS, *found[:4]]
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
    from kccl.engine.files.random_weights import random_checkpoint

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
