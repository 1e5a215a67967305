"""20,000 tokens each with and without drafts, alone and in batches, with random delays."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from drafting import tokens_of, told

from kccl.engine import Drafts, Engine
from kccl.engine.files.ngrams import write_ngrams
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.drafts import OFF
from kccl.engine.model.ngrams import build

CONTEXT, TOKENS = 112, 80


def asked(num):
    """Prompts, and how each answer's tokens are chosen."""
    noise = np.random.default_rng(4)
    found = []
    for number in range(num):
        prompt = noise.integers(0, 60, int(noise.integers(1, 30))).tolist()
        way = {"max_tokens": TOKENS, "logprobs": True, "top_logprobs": number % 3, "stop_ids": ()}
        if number % 2:
            way |= {"temperature": 0.3, "seed": number, "top_k": int(noise.integers(0, 9))}
        if number % 5 == 0:
            way["frequency_penalty"] = 0.2
        found.append((prompt, way))
    return found


@pytest.mark.long
@pytest.mark.takes(36)
@pytest.mark.parametrize(
    ("model", "ranks", "num"), [("tiny-llama", 1, 250), ("tiny-laneformer", 2, 24)]
)
def test_tokens_are_those_without_drafts(model, ranks, num, tmp_path):
    checkpoint, requests = random_checkpoint(model, context=CONTEXT), asked(num)
    noise = np.random.default_rng(5)

    def late(ids, most):
        # A copy of the rule that knows more: it also has wrong drafts, and takes its time.
        if noise.random() < 0.02:
            time.sleep(0.002)
        return ids[-most:]

    with Engine(checkpoint, ranks=ranks, blocks=1) as engine:
        plain = [told(tokens_of(engine, OFF, prompt, **way)) for prompt, way in requests]
    assert sum(map(len, plain)) == num * TOKENS
    texts = [np.array([each[0] for each in answer], np.int32) for answer in plain[::3]]
    table = tmp_path / "table"
    write_ngrams(table, build(texts, checkpoint.config.vocab_size, 12))
    accepted = []
    with Engine(checkpoint, ranks=ranks, blocks=1, ngrams=table) as engine:
        for drafts in (Drafts(3), Drafts(adapts=True), Drafts(drafter=late)):
            for (prompt, way), expected in zip(requests, plain, strict=True):
                assert told(tokens_of(engine, drafts, prompt, **way)) == expected
                accepted.append(engine.drafted.accepted)
    assert sum(accepted) > num * TOKENS / 4

    def answer(request):
        prompt, way = request
        delay = np.random.default_rng(len(prompt))
        time.sleep(delay.random() * 0.01)
        pieces = []
        with engine.submit(prompt, **way) as submission:
            for piece in submission:
                pieces.append(piece)
                if delay.random() < 0.02:
                    time.sleep(0.002)
        return told(pieces)

    for drafts in ("off", 3):
        with (
            Engine(
                checkpoint, ranks=ranks, blocks=1, slots=8, drafts=drafts, ngrams=table
            ) as engine,
            ThreadPoolExecutor(8) as pool,
        ):
            assert list(pool.map(answer, requests)) == plain
