"""SmolLM2-135M-Instruct, from the file that `kccl generate --model smollm2` fetches."""

import sysconfig
from pathlib import Path

import numpy as np
import pytest
from loading import memory_of_opening
from smollm2 import find_smollm2

from kccl.engine import Engine, SamplingParams
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.takes(20)]

TEXT = (
    "The sun is a star at the centre of the solar system. It is a ball of hot gas, mostly hydrogen "
    "and helium, and it gives the planets light and heat. The Earth goes around it once a year, "
    "and turns around itself once a day. The moon goes around the Earth in about a month. When "
    "the moon comes between the sun and the Earth, people see an eclipse."
)


@pytest.fixture(scope="module")
def smollm2():
    """The opened model."""
    with open_checkpoint(find_smollm2()) as checkpoint:
        yield checkpoint


def test_its_shape(smollm2):
    config = smollm2.config
    assert config.num_parameters() == 134_515_008
    assert (config.num_layers, config.num_lanes, config.hidden, config.ffn) == (30, 3, 576, 1536)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.vocab_size, config.context, config.is_tied) == (49152, 8192, True)
    assert config.rope.theta == 1e5 and config.rope.is_interleaved


def test_its_weights(smollm2):
    for name, shape in smollm2.config.shapes().items():
        if name.startswith(("layers.0.", "layers.29.", "norm")):
            read = smollm2.tensor(name).astype(np.float32)
            # Trained weights are small and centred; some values stand out.
            assert read.shape == shape and np.abs(read).max() < 60
            assert "norm" in name or (abs(read.mean()) < 0.01 and 0.01 < read.std() < 1)
    assert smollm2.rows("embedding", 0, 1).shape == (1, 576)


def test_its_tokenizer(smollm2):
    tokenizer = smollm2.tokenizer()
    # <|im_end|>, <|endoftext|> and <reponame>.
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (1, (2, 0, 4), 49152)
    assert not tokenizer.adds_bos
    # As today's tokenizer has it.
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    for text in (
        Path(sysconfig.get_path("stdlib"), "textwrap.py").read_text(),
        "日本 🙂 12345\n\n",
    ):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and len(ids) < len(text)


def test_its_chat(smollm2):
    tokenizer = smollm2.tokenizer()
    text = tokenizer.chat_text([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert tokenizer.encode(text, add_bos=False)[0] == 1


def test_the_capital_of_france(smollm2):
    ids = smollm2.tokenizer().encode("The capital of France is")
    ((token, logprob),) = Reference(smollm2).generate(ids, SamplingParams(max_tokens=1))
    assert smollm2.tokenizer().decode([token]) == " Paris"
    assert np.exp(logprob) > 0.5


def test_the_executor_answers(smollm2):
    """Its text is likely, too: a wrong position, head or layer makes it many times less likely."""
    with Engine(smollm2, ranks=2, blocks=1, context=512) as engine:
        answer = engine.generate("The capital of France is", max_tokens=4)
        assert answer.text.startswith(" Paris")
        ids = engine.tokenizer.encode(TEXT)
        logits = engine.logits(ids)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits[range(len(ids) - 1), ids[1:]] - np.log(np.exp(logits).sum(axis=1))
    assert np.exp(-logprobs.mean()) < 16


@pytest.mark.parametrize("ranks", [1, 2])
def test_loading_takes_a_tenth_more_than_the_packed_weights_at_most(ranks):
    assert 0.9 < memory_of_opening(find_smollm2(), ranks) < 1.1
