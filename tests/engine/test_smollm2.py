"""The reference on a trained model, SmolLM2-135M-Instruct, where the cache has it.

`make test-parity` fetches it.
"""

import numpy as np
import pytest

from kccl.engine.checkpoint import open_checkpoint
from kccl.engine.models import smollm2_file
from kccl.engine.reference import Reference
from kccl.engine.sample import SamplingParams

pytestmark = pytest.mark.timeout(300)

TEXT = (
    "The sun is a star at the centre of the solar system. It is a ball of hot gas, mostly hydrogen "
    "and helium, and it gives the planets light and heat. The Earth goes around it once a year, "
    "and turns around itself once a day. The moon goes around the Earth in about a month. When "
    "the moon comes between the sun and the Earth, people see an eclipse."
)


@pytest.fixture(scope="module")
def checkpoint():
    path = smollm2_file()
    if not path.is_file():
        pytest.skip(f"SmolLM2 is not in the cache: {path} does not exist")
    with open_checkpoint(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(checkpoint):
    return Reference(checkpoint)


def test_the_capital_of_france(checkpoint, reference):
    tokenizer = checkpoint.tokenizer()
    ids = tokenizer.encode("The capital of France is")
    ((token, logprob),) = reference.generate(ids, SamplingParams(max_tokens=1))
    assert tokenizer.decode([token]) == " Paris"
    assert np.exp(logprob) > 0.5


def test_plain_english_is_likely(checkpoint, reference):
    """Its perplexity is low. A wrong position, head or layer makes text many times less likely."""
    ids = checkpoint.tokenizer().encode(TEXT)
    logits = reference.logits(ids)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits[range(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=1))
    assert np.exp(-logprobs.mean()) < 16
