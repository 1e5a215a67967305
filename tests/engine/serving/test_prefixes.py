"""What the KV cache keeps of several conversations."""

from typing import Any

import numpy as np
import pytest

import kccl
from kccl.engine import Engine
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.prefixes import Prefixes
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.executor import BEGINNING, Place
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel.shape import Tuning

pytestmark = pytest.mark.takes(14)

TUNING = Tuning(blocks=4, warps=2, stages=4, stage_steps=2, in_flight=2, kv_strands=2, kv_splits=1)
TALKS = [[number, *range(30, 60)] for number in range(1, 5)]


def used(engine, ids, **given):
    answer = engine.generate(ids, max_tokens=4, **given)
    return engine._runner.num_cached, answer.ids


def test_the_least_recently_used_gives_way():
    with Engine(random_checkpoint("tiny-laneformer"), ranks=2, blocks=1, prefixes=3) as engine:
        first = [used(engine, ids) for ids in TALKS[:3]]
        assert [cached for cached, _ in first] == [0, 0, 0]
        # Each goes on where it was, also behind the others.
        for ids, (_, answer) in zip(TALKS[:3], first, strict=True):
            assert used(engine, [*ids, *answer, 7])[0] == len(ids) + 3
        assert used(engine, TALKS[3])[0] == 0
        assert used(engine, TALKS[1])[0] == len(TALKS[1]) - 1
        assert used(engine, TALKS[0])[0] == 0


@pytest.mark.parametrize("model", ["tiny-laneformer", "tiny-llama"])
def test_a_beginning_that_two_share_is_copied(model):
    """And has the bits of one that was computed."""
    shared = list(range(5, 75))
    a, b = [*shared, *range(100, 180)], [*shared, 9, 8]
    with Engine(random_checkpoint(model, context=256), ranks=2, blocks=1) as engine:
        wanted = engine.generate(b, max_tokens=20, logprobs=True)
        rest = engine.generate(a, max_tokens=20, logprobs=True)
    with Engine(random_checkpoint(model, context=256), ranks=2, blocks=1, prefixes=2) as engine:
        engine.generate(a, max_tokens=1)
        found = engine.generate(b, max_tokens=20, logprobs=True)
        assert engine._runner.num_cached == len(shared)
        assert (found.ids, found.logprobs) == (wanted.ids, wanted.logprobs)
        # The other one has not lost anything.
        again = engine.generate(a, max_tokens=20, logprobs=True)
        assert engine._runner.num_cached == len(a) - 1
        assert (again.ids, again.logprobs) == (rest.ids, rest.logprobs)


def test_logits_and_answers_leave_each_other_what_they_computed():
    with Engine(random_checkpoint("tiny-llama"), blocks=1, prefixes=2) as engine:
        wanted = engine.logits(TALKS[1])
        answer = engine.generate(TALKS[0], max_tokens=3)
        assert (engine.logits(TALKS[1]) == wanted).all()
        assert used(engine, TALKS[0])[0] == len(TALKS[0]) - 1
        assert used(engine, TALKS[1])[0] == len(TALKS[1]) - 1
        assert used(engine, [*TALKS[0], *answer.ids])[0] == len(TALKS[0]) + 2


def test_logits_in_pieces_are_those_of_the_whole():
    ids = list(range(1, 90))
    with Engine(random_checkpoint("tiny-laneformer"), ranks=2, blocks=1) as engine:
        whole = engine.logits(ids)
        pieces = list(engine._runner.scores(ids, 20))
    assert [len(piece) for piece in pieces] == [20, 20, 20, 20, 9]
    assert (np.concatenate(pieces) == whole).all()


def test_an_answer_that_failed_leaves_nothing():
    prefixes = Prefixes(2)
    place, _ = prefixes.find([1, 2, 3], "a")
    prefixes.begin(place, "a")
    prefixes.keep(place, [1, 2, 3])
    place, shared = prefixes.find([1, 2, 3, 4], "a")
    assert place.num_cached == 3 and max(shared) == 3
    prefixes.begin(place, "a")
    assert prefixes.find([1, 2, 3, 4], "a")[0].num_cached == 0
    # Made otherwise: of no use.
    prefixes.keep(place, [1, 2, 3])
    assert prefixes.find([1, 2, 3, 4], "b")[0].num_cached == 0


@pytest.mark.parametrize(
    ("backend", "number", "message"),
    [
        ("host", 0, "prefixes is 0, must be from 1 to 64"),
        ("sim", 65, "prefixes is 65, must be from 1 to 64"),
        ("host", "2", "prefixes is '2', must be an integer"),
    ],
)
def test_how_many_there_may_be(backend, number, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        Engine(random_checkpoint("tiny-llama"), backend, prefixes=number)


SMALL = {"hidden": 64, "head_dim": 16, "vocab_size": 128, "context": 64, "ffn": 128}
SMALL |= {"num_lanes": 4, "num_heads": 8, "num_kv_heads": 4, "num_layers": 1}


@pytest.mark.long
def test_the_simulators_slots_keep_what_they_have():
    """With the bits of conversations that run from their beginning."""
    shared = list(range(3, 20))
    talks = {"a": [*shared, *range(40, 60)], "b": [*shared, 70], "c": [90, 91]}
    # The second slot gets a copy of the beginning of "a"; then each goes on where it was. "c" takes
    # the slot of "a", which was used before "b".
    order = [("a", 0), ("b", 17), ("a", 36), ("b", 17), ("c", 0), ("b", 17)]
    params = SamplingParams(max_tokens=2, logprobs=True)

    def main(comm: kccl.Communicator) -> None:
        checkpoint = random_checkpoint("tiny-llama", **SMALL)
        one, two = (
            DeviceExecutor(checkpoint, comm, tuning=TUNING, context=64, slots=slots)
            for slots in (1, 2)
        )

        def tokens(executor: DeviceExecutor, ids: list[int], place: Place) -> list[Any]:
            executor.start(ids, params, place=place)
            return [(token.id, token.logprob) for token in executor.tokens()]

        wanted = {name: tokens(one, ids, BEGINNING) for name, ids in talks.items()}
        prefixes = Prefixes(2)
        for name, cached in order:
            place, _ = prefixes.find(talks[name], "")
            assert place.num_cached == cached, name
            prefixes.begin(place, "")
            assert tokens(two, talks[name], place) == wanted[name]
            prefixes.keep(place, talks[name])

    kccl.run_threads(main, 2, backend="sim")


@pytest.mark.long
def test_the_simulators_cache_keeps_what_logits_computed():
    ids = [1, 2, 3, 4, 5]
    with Engine(random_checkpoint("tiny-llama", **SMALL), "sim", prefixes=2) as engine:
        wanted = engine.generate(ids, max_tokens=3, logprobs=True)
        engine.generate([9], max_tokens=1)
        engine.logits(ids)
        found = engine.submit(ids, max_tokens=3, logprobs=True)
        pieces = [(piece.id, piece.logprob) for piece in found]
        assert pieces == list(zip(wanted.ids, wanted.logprobs, strict=True))
        assert found.num_cached == 4
        with pytest.raises(kccl.InvalidArgument, match=r"^stop_ids has 65 ids, must have at most"):
            list(engine.submit(ids, stop_ids=range(65)))
        assert [piece.id for piece in engine.submit(ids, max_tokens=3)] == wanted.ids
