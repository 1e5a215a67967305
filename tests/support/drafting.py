"""Answers with drafts, as the executor gives them, a drafter that knows an answer, and weights
whose texts repeat themselves.
"""

from dataclasses import replace

import numpy as np

from kccl.engine import SamplingParams
from kccl.engine.files.random_weights import RandomSource
from kccl.engine.formats.base import Stored
from kccl.engine.model.drafts import OFF

# How many ids FewIds gives logits.
LIKELY = 5


class FewIds(RandomSource):
    """Random weights. Few ids have a logit that is not 0, so texts repeat themselves."""

    def read(self, name: str, start: int, stop: int) -> Stored:
        rows = super().read(name, start, stop)
        if name != "head":
            return rows
        is_likely = np.arange(start, stop) < LIKELY
        return replace(rows, words=rows.words * is_likely[:, None].astype(rows.words.dtype))


def tokens_of(engine, drafts, ids, cancellation=None, **given):
    """The tokens of an answer, as the executor gives them."""
    engine._runner.drafts = drafts
    try:
        params = SamplingParams(**given)
        return list(engine._runner.tokens(list(ids), params, cancellation=cancellation))
    finally:
        engine._runner.drafts = OFF


def told(tokens):
    """All that a caller sees of tokens but their times."""
    return [
        (each.id, np.float64(each.logprob).tobytes(), each.end, each.alternatives)
        for each in tokens
    ]


def knows(prompt, answer, errors=()):
    """A drafter that knows the answer, but for the tokens with the numbers in `errors`."""

    def draft(ids, most):
        at = len(ids) - len(prompt)
        rest = list(answer[at : at + most])
        return [(each + 1) % 100 if at + i in errors else each for i, each in enumerate(rest)]

    return draft
