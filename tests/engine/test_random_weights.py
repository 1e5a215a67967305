import numpy as np
import pytest

import kccl
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import MODELS, random_checkpoint


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama-1b", 1_235_814_400),
        ("qwen3-0.6b", 596_049_920),
        ("smollm2", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("mistral-7b", 7_241_732_096),
    ],
)
def test_shapes_have_the_models_parameter_counts(model, parameters):
    assert MODELS[model].num_parameters() == parameters


def test_tensors_are_the_same_each_time_and_differ_from_each_other():
    one, again, other = (random_checkpoint("tiny-laneformer", seed=seed) for seed in (1, 1, 2))
    wq = one.tensor("layers.0.wq")
    assert (wq == again.tensor("layers.0.wq")).all()
    for different in (other.tensor("layers.0.wq"), one.tensor("layers.1.wq")):
        assert (wq != different).mean() > 0.99


@pytest.mark.parametrize("lm_head", ["replicate", "vocab_parallel"])
def test_rows_are_those_of_the_whole_tensor(lm_head):
    checkpoint = random_checkpoint("tiny-laneformer", lm_head=lm_head)
    for name in ("embedding", "head"):
        rows = [checkpoint.rows(name, start, start + 32) for start in range(0, 256, 32)]
        assert (np.concatenate(rows) == checkpoint.tensor(name)).all()


@pytest.mark.parametrize("model", ["tiny-laneformer", "tiny-llama", "tiny-qwen3"])
def test_activations_are_near_1(model):
    reference = Reference(random_checkpoint(model))
    for op, output in reference.steps(range(0, 256, 4)):
        # A tied embedding has small values, so that logits do not become large.
        assert 0.1 < output.std() < 2, op.name


def test_errors():
    with pytest.raises(kccl.InvalidArgument, match=r"'gpt' is none of .*laneformer-2b"):
        random_checkpoint("gpt")
    with pytest.raises(kccl.InvalidArgument, match="num_layers"):
        random_checkpoint("tiny-llama", num_layers=0)
    with pytest.raises(kccl.Error, match="random weights of tiny-llama: there is no tokenizer"):
        random_checkpoint("tiny-llama").tokenizer()
