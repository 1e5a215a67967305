"""Engines of a job: ranks that are processes, and what happens if they differ."""

import os
import subprocess
import sys
import textwrap

import pytest

RANK = """
import os, time
import kccl
from kccl.engine import Engine
from kccl.engine.executors.ranks import Wanted
from kccl.engine.files.random_weights import random_checkpoint

checkpoint = random_checkpoint("tiny-laneformer", context=4096)
"""


def run_job(body, number=2, timeout=5):
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
    done = run_job(body)
    assert (done.returncode, done.stdout) == (0, "equal\n"), done.stderr


@pytest.mark.long
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
    done = run_job(body)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "another rank ended the request before its end\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("given", "name"), [("blocks=1 + rank", "blocks"), ("context=100 + rank", "context")]
)
def test_ranks_with_different_engines_are_told(given, name):
    body = f"""
    rank = int(os.environ["KCCL_RANK"])
    Engine(checkpoint, {given})
    """
    done = run_job(body)
    assert done.returncode != 0
    assert f"{name} differs between the ranks, must be the same on all" in done.stderr


@pytest.mark.long
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
    done = run_job(body)
    assert (done.returncode, done.stdout) == (0, "answered\n"), done.stderr


def test_a_rank_that_stops_is_named_with_the_step():
    body = """
    with Engine(checkpoint, blocks=1) as engine:
        if engine.rank == 0:
            engine.logits([1])
        else:
            # Makes the same request, and never begins it.
            engine._ranks._agree(Wanted("logits [1] 1"))
            time.sleep(3)
    """
    # The limit of the first call, which is 300 s, is over when the engine is open.
    done = run_job(body, timeout=1)
    assert done.returncode != 0
    assert "decoding on rank 0: block 0 of rank 1 did not arrive; rank 0 waited for" in done.stderr
    assert "step seen 0, wanted" in done.stderr and "; open a new Engine" in done.stderr
