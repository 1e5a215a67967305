"""A model's shape and switches, and its rotary frequencies."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kccl
from kccl.engine.files.random_weights import MODELS
from kccl.engine.model.config import ModelConfig, lanes_for
from kccl.engine.model.experts import MOST_CHOSEN, MOST_EXPERTS, Experts
from kccl.engine.model.rope import LinearScaling, Llama3Scaling, Rope, TableScaling

SMALL = {
    "family": "laneformer",
    "num_layers": 4,
    "num_lanes": 2,
    "hidden": 8,
    "ffn": 12,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 6,
    "vocab_size": 10,
    "context": 32,
    "window": 4,
    "window_layers": 3,
    "delay": 2,
}


def test_laneformer_2b_has_the_published_size():
    config = MODELS["laneformer-2b"]
    assert config.num_parameters() == 2_320_069_632
    ffn = sum(math.prod(config.layer_shapes()[name]) for name in ("w1", "w2", "w3"))
    matrices = sum(math.prod(shape) for shape in config.layer_shapes().values() if len(shape) == 3)
    assert ffn / matrices == 0.8
    assert config.shapes()["layers.14.wo"] == (8, 3072, 384)


def test_a_tied_table_is_read_as_the_head():
    untied = ModelConfig(**SMALL)
    tied = ModelConfig(**SMALL, is_tied=True)
    assert untied.num_parameters() - tied.num_parameters() == 80
    assert "head" not in tied.shapes()


def test_windows_of_layers():
    config = ModelConfig(**SMALL)
    assert [config.window_of(layer) for layer in range(4)] == [4, 4, 4, 0]
    some = ModelConfig(**SMALL | {"window_layers": (1, 3)})
    assert [some.window_of(layer) for layer in range(4)] == [0, 4, 0, 4]
    assert ModelConfig(**SMALL | {"window_layers": (0, 1, 2)}) == config


def test_biases_are_parameters():
    plain = MODELS["tiny-llama"]
    biased = dataclasses.replace(plain, biases=("qkv", "out", "gate_up", "down"))
    heads = (plain.num_heads + 2 * plain.num_kv_heads) * plain.head_dim
    each = heads + plain.hidden + 2 * plain.ffn + plain.hidden
    more = biased.num_parameters() - plain.num_parameters()
    assert more == plain.num_layers * each


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"family": "gpt2"}, r"^family is 'gpt2', must be one of laneformer, llama, "),
        ({"num_layers": 0}, "num_layers is 0, must be an integer from 1 to 4096"),
        ({"num_layers": 2**40}, "num_layers is 1099511627776"),
        ({"hidden": True}, "hidden is True, must be an integer"),
        ({"hidden": 8.0}, r"hidden is 8\.0, must be an integer"),
        ({"num_lanes": 9}, "num_lanes is 9, must be an integer from 1 to 8"),
        ({"num_lanes": 4}, "num_kv_heads is 2, must be divisible by num_lanes, 4"),
        ({"num_kv_heads": 6}, "num_heads is 4, must be divisible by num_kv_heads, 6"),
        ({"ffn": 13}, "ffn is 13, must be divisible by num_lanes, 2"),
        ({"head_dim": 5}, "head_dim is 5, must be even"),
        ({"norm_eps": 0.0}, r"norm_eps is 0\.0, must be a number above 0"),
        ({"norm_eps": math.nan}, "norm_eps is nan"),
        ({"attention_scale": -1.0}, r"attention_scale is -1\.0"),
        ({"window_layers": 5}, "window_layers is 5, must be an integer from 0 to 4"),
        ({"window_layers": (1, 1)}, r"window_layers is \(1, 1\), must be numbers of layers in asc"),
        ({"window_layers": (0, 4)}, r"window_layers is \(0, 4\), must be .* from 0 to 3"),
        ({"biases": ("out", "qkv")}, r"biases is \('out', 'qkv'\), must be a tuple of some of qkv"),
        ({"biases": "qkv"}, "biases is 'qkv', must be a tuple of some of qkv, out, gate_up, down"),
        ({"biases": ("qkv",)}, r"biases is \('qkv',\), which a Laneformer does not have"),
        (
            {"biases": ("router",), "delay": 0, "family": "llama"},
            "biases has 'router', which only mixtures have",
        ),
        ({"experts": Experts(num=2, chosen=1)}, r"experts is Experts\(.*, which a Laneformer does"),
        ({"experts": 2}, "experts is 2, must be Experts or None"),
        ({"swiglu_limit": 7.0}, r"swiglu_limit is 7\.0, which a Laneformer does not have"),
        ({"has_sinks": True}, "has_sinks is True, which a Laneformer does not have"),
        ({"window": 0}, "window is 0 and window_layers is 3, must be both 0 or neither"),
        ({"delay": 5}, "delay is 5, must be an integer from 0 to 4"),
        ({"early_comm": 1}, "early_comm is 1, must be True or False"),
        ({"message_dtype": "float16"}, "message_dtype is 'float16'"),
        ({"lm_head": "vocab_parallel", "vocab_size": 11}, "vocab_size is 11, must be divisible"),
        ({"lm_head": "vocab_parallel", "is_tied": True}, "so is_tied must be False"),
        ({"family": "llama"}, "delay is 2, which models of the family llama do not have"),
        ({"delay": 0, "mlp_comm": False}, "mlp_comm is False, must be True where delay is 0"),
        (
            {"delay": 0, "attention_comm": False},
            "attention_comm is False, must be True where delay is 0",
        ),
        (
            {"rope": Rope(scaling=TableScaling((1.0, 2.0)))},
            "2 factors, must have one for each of 3",
        ),
    ],
)
def test_a_wrong_field_is_named(change, told):
    with pytest.raises(kccl.InvalidArgument, match=told):
        ModelConfig(**SMALL | change)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num": 0, "chosen": 1}, "experts.num is 0, must be an integer from 1 to 1024"),
        ({"num": MOST_EXPERTS + 1, "chosen": 1}, "experts.num is 1025"),
        ({"num": 4, "chosen": 5}, "experts.chosen is 5, must be an integer from 1 to 4"),
        ({"num": 99, "chosen": MOST_CHOSEN + 1}, "experts.chosen is 33"),
        ({"num": 4, "chosen": True}, "experts.chosen is True"),
        ({"num": 4, "chosen": 2, "is_normalised": 1}, "experts.is_normalised is 1, must be True"),
    ],
)
def test_a_wrong_field_of_experts_is_named(given, told):
    with pytest.raises(kccl.InvalidArgument, match=told):
        Experts(**given)


@pytest.mark.parametrize("is_normalised", [True, False])
def test_of_equal_logits_the_lower_ids_are_chosen(is_normalised):
    logits = np.array([[0, 2, 1, 2, 1, 1], [5, 5, 5, 5, 5, 5]], np.float32)
    ids, weights = Experts(num=6, chosen=3, is_normalised=is_normalised).choose(logits)
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2]]
    powers = np.exp(logits.astype(np.float64))
    wanted = np.take_along_axis(powers, ids, 1)
    wanted /= (wanted if is_normalised else powers).sum(1, keepdims=True)
    np.testing.assert_allclose(weights, wanted, rtol=1e-6)


FIELDS = [field.name for field in dataclasses.fields(ModelConfig)]
ANYTHING = st.one_of(
    st.integers(-4, 40), st.integers(), st.floats(), st.booleans(), st.text(), st.none()
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([name for name in FIELDS if name != "rope"]), ANYTHING))
def test_any_value_of_any_field_is_taken_or_named(change):
    try:
        config = ModelConfig(**SMALL | change)
    except kccl.InvalidArgument as error:
        assert "\n" not in str(error)
        assert any(name in str(error) for name in FIELDS)
    else:
        assert config.num_parameters() == sum(map(math.prod, config.shapes().values()))


@settings(deadline=None)
@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 100))
def test_lanes_divide_heads_and_ffn(num_kv_heads, group, ffn):
    lanes = lanes_for(num_kv_heads * group, num_kv_heads, ffn)
    wider = [n for n in range(lanes + 1, 9) if num_kv_heads % n == 0 and ffn % n == 0]
    assert num_kv_heads % lanes == ffn % lanes == 0 and wider == []


def test_smollm2_has_three_lanes():
    assert lanes_for(9, 3, 1536) == 3


def test_unscaled_frequencies():
    frequencies = Rope(theta=10_000.0).frequencies(96)
    assert frequencies.shape == (48,) and frequencies.dtype == np.float64
    assert frequencies[0] == 1 and frequencies[24] == pytest.approx(10_000.0**-0.5)


def llama3_frequency(frequency, factor, low, high, context):
    """Llama 3.1's rule for one pair, in wavelengths, as its authors state it."""
    wavelength = 2 * math.pi / frequency
    if wavelength < context / high:
        return frequency
    if wavelength > context / low:
        return frequency / factor
    smooth = (context / wavelength - low) / (high - low)
    return (1 - smooth) * frequency / factor + smooth * frequency


def test_scaled_frequencies():
    rope = Rope(theta=500_000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    unscaled = Rope(theta=500_000.0).frequencies(128)
    wanted = [llama3_frequency(each, 8.0, 1.0, 4.0, 8192) for each in unscaled]
    np.testing.assert_allclose(rope.frequencies(128), wanted, rtol=1e-12)
    # All three cases occur.
    ratios = rope.frequencies(128) / unscaled
    assert ratios[0] == 1 and ratios[-1] == 1 / 8 and ((ratios < 1) & (ratios > 1 / 8)).any()
    assert (Rope(scaling=LinearScaling(4.0)).frequencies(8) * 4 == Rope().frequencies(8)).all()
    table = Rope(scaling=TableScaling((1.0, 2.0))).frequencies(4)
    assert table.tolist() == [1.0, Rope().frequencies(4)[1] / 2]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Rope(theta=0.0), r"theta of RoPE is 0\.0"),
        (lambda: LinearScaling(-1.0), "the factor of the RoPE scaling"),
        (lambda: Llama3Scaling(8.0, 4.0, 4.0, 8192), "high_freq_factor of the RoPE scaling is 4.0"),
        (lambda: Llama3Scaling(8.0, 1.0, 4.0, 0), "original_context of the RoPE scaling is 0"),
        (lambda: TableScaling((1.0, math.inf)), "a factor of the RoPE scaling is inf"),
    ],
)
def test_a_wrong_scaling_is_named(make, told):
    with pytest.raises(kccl.InvalidArgument, match=told):
        make()
