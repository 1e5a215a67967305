"""Answers with drafts, as the executor gives them, and a drafter that knows an answer."""

import numpy as np

from kccl.engine import SamplingParams
from kccl.engine.model.drafts import OFF


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
