"""The monokernel on a GPU: the bundled model, beside the host's executor."""

import numpy as np
import pytest

pytest.importorskip("tokenizers", reason="the engine's libraries are not installed")
pytest.importorskip("safetensors", reason="the engine's libraries are not installed")

from kccl.engine import Engine
from kccl.engine.checkpoint import open_checkpoint
from kccl.engine.models import find_model
from kccl.engine.sample import SamplingParams, sample

PROMPT = "def fibonacci(n):\n"
# Keys and values are F16: an error of 0.064 was seen, at logits of up to 38.
TOLERANCE = 0.2


@pytest.fixture(scope="module")
def checkpoint():
    with open_checkpoint(find_model("bundled")) as opened:
        yield opened


@pytest.fixture(scope="module")
def engine(checkpoint):
    with Engine(checkpoint, "cuda", 1) as opened:
        yield opened


@pytest.fixture(scope="module")
def host(checkpoint):
    with Engine(checkpoint, ranks=1) as opened:
        yield opened


def test_logits_are_those_of_the_host(engine, host):
    ids = host.tokenizer.encode(PROMPT) + host.generate(PROMPT, max_tokens=1000, stop_ids=()).ids
    found, wanted = engine.logits(ids), host.logits(ids)
    np.testing.assert_allclose(found, wanted, atol=TOLERANCE)
    ordered = np.sort(wanted, axis=1)
    is_sure = ordered[:, -1] - ordered[:, -2] > TOLERANCE
    assert is_sure.mean() > 0.5
    assert (found.argmax(axis=1) == wanted.argmax(axis=1))[is_sure].all()
    np.testing.assert_array_equal(engine.logits(ids).view(np.uint32), found.view(np.uint32))


def test_ranks_that_share_a_gpu_have_the_same_bits(checkpoint, engine):
    ids = engine.tokenizer.encode(PROMPT)
    one = engine.generate(ids, max_tokens=1000, stop_ids=()).ids
    with Engine(checkpoint, "cuda", 2) as two:
        assert two.generate(ids, max_tokens=1000, stop_ids=()).ids == one
        logits = two.logits(ids + one)
    np.testing.assert_array_equal(logits.view(np.uint32), engine.logits(ids + one).view(np.uint32))


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": 1.0},
        {"temperature": 0.8, "top_k": 40, "top_p": 0.9},
        {"repetition_penalty": 1.3, "logprobs": True},
    ],
    ids=str,
)
def test_tokens_are_chosen_as_by_the_oracle(engine, given):
    """From the kernel's own logits, which prefill and decode made: the cache has the same bits."""
    params = SamplingParams(max_tokens=64, seed=5, **given)
    ids = engine.tokenizer.encode(PROMPT)
    answer = engine.generate(ids, params)
    logits = engine.logits(ids + answer.ids[:-1])[len(ids) - 1 :]
    history = list(ids)
    for token, logprob, row in zip(answer.ids, answer.logprobs, logits, strict=True):
        wanted, wanted_logprob = sample(row, params, len(history), history)
        assert token == wanted
        if params.logprobs:
            assert logprob == pytest.approx(wanted_logprob, rel=1e-5, abs=1e-6)
        history.append(token)


def test_an_answer_may_be_given_up_at_each_of_its_first_tokens(engine):
    whole = engine.generate(PROMPT, max_tokens=60, stop_ids=()).ids
    for num in range(1, 51):
        pieces = engine.stream(PROMPT, max_tokens=2000, stop_ids=())
        assert [next(pieces).id for _ in range(num)] == whole[:num]
        pieces.close()
        ended = engine.generate(PROMPT, max_tokens=60, stop_ids=(whole[num - 1],))
        first = whole.index(whole[num - 1])
        assert (ended.ids, ended.end) == (whole[: first + 1], "stop")
