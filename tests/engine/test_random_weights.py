import numpy as np
import pytest

import kccl
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import MODELS, random_checkpoint, shape_of


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        ("llama-1b", 1_235_814_400),
        ("llama-8b", 8_030_261_248),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("smollm2", 134_515_008),
        ("qwen2.5-0.5b", 494_032_768),
        ("mistral-7b", 7_241_732_096),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
        ("gpt-oss-120b", 116_829_156_672),
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


@pytest.mark.parametrize("model", ["tiny-laneformer", "tiny-llama", "tiny-qwen3", "tiny-qwen3-moe"])
def test_activations_are_near_1(model):
    reference = Reference(random_checkpoint(model))
    for op, output in reference.steps(range(0, 256, 4)):
        # A tied embedding has small values, so that logits do not become large.
        assert 0.1 < output.std() < 2, op.name


def test_a_shape_may_have_its_first_layers_alone():
    part = shape_of("gpt-oss-20b:3")
    assert part.num_layers == 3 and part.window_layers == (0, 2)
    assert shape_of("laneformer-2b:1").delay == 1
    assert shape_of("tiny-llama") is MODELS["tiny-llama"]


def test_experts_are_stored_as_they_are_published():
    checkpoint = random_checkpoint("gpt-oss-20b:1")
    assert checkpoint.stored == ("BF16", "MXFP4")


def test_errors():
    with pytest.raises(kccl.InvalidArgument, match=r"'gpt' is none of .*laneformer-2b"):
        random_checkpoint("gpt")
    for wrong in ("tiny-llama:4", "tiny-llama:0", "tiny-llama:", "tiny-llama:x"):
        with pytest.raises(kccl.InvalidArgument, match="a number of layers from 1 to 3"):
            random_checkpoint(wrong)
    with pytest.raises(kccl.InvalidArgument, match="num_layers"):
        random_checkpoint("tiny-llama", num_layers=0)
    with pytest.raises(kccl.Error, match="random weights of tiny-llama: there is no tokenizer"):
        random_checkpoint("tiny-llama").tokenizer()
