"""The queue of an engine: order, bounds, and ends."""

import os
import subprocess
import sys
import textwrap
import threading

import pytest
from long import long_after

import kccl
from kccl.engine import Engine, QueueFull
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.serving.jobs import Score
from kccl.engine.serving.submission import CANCELLED, End

IDS = [1, 2, 3]
LONG = 4000


@pytest.fixture
def engine():
    with Engine(random_checkpoint("tiny-laneformer", context=4096), ranks=2, blocks=1) as engine:
        yield engine


def waits_for(submission, number=1):
    """Takes some pieces of an answer that goes on."""
    pieces = iter(submission)
    return [next(pieces).id for _ in range(number)]


def test_requests_are_answered_in_their_order(engine):
    expected = [engine.generate([each], max_tokens=8).ids for each in IDS]
    ended = []
    submissions = [engine.submit([each], max_tokens=8) for each in IDS]
    for index, each in enumerate(submissions):
        each.listen(lambda item, i=index: ended.append(i) if isinstance(item, End) else None)
    found = [[piece.id for piece in each] for each in submissions]
    assert found == expected and ended == [0, 1, 2]
    # Who comes later sees the same.
    assert [[piece.id for piece in each] for each in submissions] == expected
    assert [each.end for each in submissions] == [End("max_tokens")] * 3


def test_a_full_queue_refuses(engine):
    engine.sessions.limit = 1
    with engine.submit(IDS, max_tokens=LONG) as running:
        waits_for(running)
        waiting = engine.submit(IDS, max_tokens=1)
        with pytest.raises(QueueFull, match="1 requests wait, must be fewer than 1"):
            engine.submit(IDS)
        assert (engine.sessions.num_running, engine.sessions.num_waiting) == (1, 1)
    assert len(list(waiting)) == 1
    assert running.end == End(CANCELLED)


def test_a_request_is_cancelled_wherever_it_is(engine):
    expected = engine.generate(IDS, max_tokens=5).ids
    running = engine.submit(IDS, max_tokens=LONG)
    assert waits_for(running, 5) == expected
    waiting = engine.submit(IDS, max_tokens=LONG)
    behind = engine.submit(IDS, max_tokens=5)
    waiting.cancel()
    assert (list(waiting), waiting.end) == ([], End(CANCELLED))
    running.cancel()
    assert [piece.id for piece in running][:5] == expected and running.end == End(CANCELLED)
    # It runs, and nothing of those before ends it.
    running.cancel()
    assert [piece.id for piece in behind] == expected
    # In the prompt, or before it began.
    prompt = engine.submit([2] * LONG, max_tokens=5)
    prompt.cancel()
    scored = engine.submit(IDS, max_tokens=5)
    assert (list(prompt), prompt.end) == ([], End(CANCELLED))
    assert [piece.id for piece in scored] == expected


def test_cancellations_at_random_moments_hit_their_request(engine):
    expected = engine.generate(IDS, max_tokens=40).ids
    for number in range(0, 30, 3):
        one, other = engine.submit(IDS, max_tokens=40), engine.submit(IDS, max_tokens=40)
        waits_for(one, 1 + number)
        threads = [threading.Thread(target=one.cancel) for _ in range(2)]
        for each in threads:
            each.start()
        assert [piece.id for piece in other] == expected
        for each in threads:
            each.join()
        assert one.end in (End(CANCELLED), End("max_tokens"))


def test_direct_calls_and_submissions_take_turns(engine):
    expected = engine.generate(IDS, max_tokens=30).ids
    pieces = engine.stream(IDS, max_tokens=30)
    found = [next(pieces).id]
    waiting = engine.submit(IDS, max_tokens=30)
    found += [piece.id for piece in pieces]
    assert [piece.id for piece in waiting] == found == expected


def test_scores_are_the_models(engine):
    ids = [5, 9, 200, 31, 7]
    answer = engine.generate(ids[:1], max_tokens=1, logprobs=True, top_logprobs=3)
    found = list(engine.sessions.submit(Score(ids, 3)))
    assert len(found) == 4
    (likeliest, logprob), *_ = found[0].alternatives
    assert (likeliest, logprob) == (answer.ids[0], pytest.approx(answer.logprobs[0], abs=1e-12))
    assert all(each.logprob <= each.alternatives[0][1] for each in found)


def test_what_fails_fails_alone(engine, monkeypatch):
    before = engine.submit(IDS, max_tokens=2)
    list(before)
    monkeypatch.setattr(engine._ranks.mine[0], "tokens", lambda: iter([1 / 0]) if 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(engine.submit(IDS))
    monkeypatch.undo()
    assert len(list(engine.submit(IDS, max_tokens=2))) == 2


def test_what_is_no_exception_fails_the_engine_and_leaves_nobody_waiting(engine, monkeypatch):
    class Panic(BaseException):
        pass

    def fail():
        began.set()
        assert goes.wait(60)
        raise Panic("the library panics")

    began, goes = threading.Event(), threading.Event()
    list(engine.submit(IDS, max_tokens=2))
    monkeypatch.setattr(engine._ranks.mine[0], "tokens", fail)
    running = engine.submit(IDS)
    assert began.wait(60)
    waiting = engine.submit(IDS)
    ended = [threading.Event(), threading.Event()]
    for each, event in zip((running, waiting), ended, strict=True):
        each.listen(lambda item, event=event: isinstance(item, End) and event.set())
    goes.set()
    for each, event in zip((running, waiting), ended, strict=True):
        assert event.wait(20)
        assert isinstance(each.end.error, Panic)
    assert isinstance(engine.sessions.failure, Panic)
    with pytest.raises(kccl.Error, match="the engine has failed: the library panics"):
        engine.submit(IDS)


def test_close_ends_what_runs_and_waits():
    engine = Engine(random_checkpoint("tiny-llama", context=4096), blocks=1)
    running, waiting = engine.submit(IDS, max_tokens=LONG), engine.submit(IDS)
    waits_for(running)
    engine.close()
    assert (running.end, waiting.end) == (End(CANCELLED), End(CANCELLED))
    with pytest.raises(kccl.InvalidArgument, match="the engine is closed"):
        engine.submit(IDS)


def run_job(body, number=2):
    program = textwrap.dedent(
        """
        import time
        import kccl
        from kccl.engine import Engine
        from kccl.engine.files.random_weights import random_checkpoint

        checkpoint = random_checkpoint("tiny-laneformer", context=4096)
        """
    ) + textwrap.dedent(body)
    command = [sys.executable, "-m", "kccl", "run", "-n", str(number), "--"]
    return subprocess.run(
        [*command, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"KCCL_TIMEOUT": "5"},
    )


@pytest.mark.parametrize("pause_s", long_after(1, [0, 5.5]))
def test_rank_0_submits_and_the_others_follow(pause_s):
    """Also behind a pause that is longer than ranks wait for each other."""
    body = """
    with Engine(checkpoint, blocks=1, prefixes=2) as engine:
        wanted = engine.generate([1, 2, 3], max_tokens=10, temperature=1.0, seed=4).ids
        if engine.rank != 0:
            engine.sessions.follow()
        else:
            engine.sessions.start()
            time.sleep(PAUSE)
            with engine.submit([1, 2, 3], max_tokens=4000) as long:
                next(iter(long))
            fields = {"temperature": 1.0, "seed": 4, "stop_ids": (), "logit_bias": {}}
            one = engine.submit([1, 2, 3], max_tokens=10, **fields)
            assert [piece.id for piece in one] == wanted
            other = engine.submit([9, 2, 3], max_tokens=10)
            list(other)
            again = engine.submit([1, 2, 3, *wanted[:5]], max_tokens=5, **fields)
            assert [piece.id for piece in again] == wanted[5:], again
            assert again.num_cached == 7
            print("equal")
    """
    done = run_job(body.replace("PAUSE", str(pause_s)))
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


def test_a_lost_rank_ends_what_was_asked():
    body = """
    engine = Engine(checkpoint, blocks=1)
    if engine.rank != 0:
        try:
            engine.sessions._runner.ranks.of_rank_0(None)
        finally:
            import os
            os._exit(3)
    one, two = engine.submit([1, 2, 3]), engine.submit([1, 2, 3])
    for each in (one, two):
        try:
            list(each)
        except kccl.Error as error:
            print("rank 1" in str(error))
    try:
        engine.submit([1])
    except kccl.Error as error:
        print("the engine has failed" in str(error))
    """
    done = run_job(body)
    assert done.stdout == "True\nTrue\nTrue\n", done.stderr


def test_other_ranks_cannot_submit():
    body = """
    with Engine(checkpoint, blocks=1) as engine:
        if engine.rank == 1:
            try:
                engine.submit([1])
            except kccl.InvalidArgument as error:
                print(error)
    """
    done = run_job(body)
    assert "rank 1 cannot submit: rank 0 does, and the others call follow()" in done.stdout
