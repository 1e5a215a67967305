"""What config.json says of quantised weights: what is read, and what is refused by name."""

import copy
import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_folders import FLOAT, FLOAT4, INT4, LAYOUTS, NVFLOAT4, compressed
from tiny_models import LANEFORMER, LLAMA

import kccl
from kccl.engine.files.hf_config import read_config
from kccl.engine.files.quantization import read_quantization
from kccl.engine.files.schemes import Layout, Scheme

MODULE = "model.layers.3.mlp.up_proj"


def read(tmp_path, quantization):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    return read_quantization(path)


def of(name, **changes):
    return LAYOUTS[name][0] | changes


def weights(**changes):
    """A configuration of compressed-tensors with other weights."""
    return compressed("pack-quantized", INT4 | {"group_size": 32} | changes)


def group(**changes):
    """One with other fields of its group."""
    made = compressed("float-quantized", FLOAT | {"strategy": "channel"})
    made["config_groups"]["group_0"] |= changes
    return made


SCHEMES = {
    "fp8 blocks": Scheme(Layout.E4M3, ("weight_scale_inv", "weight_scale"), 128, 128),
    "fp8 tensor": Scheme(Layout.E4M3, ("weight_scale_inv", "weight_scale"), 0, 0),
    "fp8 compressed tensor": Scheme(Layout.E4M3, ("weight_scale",), 0, 0),
    "fp8 compressed rows": Scheme(Layout.E4M3, ("weight_scale",), 1, 0),
    "int8 packed": Scheme(Layout.PACKED8, ("weight_scale",), 1, 0),
    "int4 64 zeros": Scheme(Layout.PACKED4, ("weight_scale",), 1, 64, has_zeros=True),
    "awq 32": Scheme(Layout.AWQ, ("scales",), 1, 32, has_zeros=True),
    "gptq rows": Scheme(Layout.GPTQ, ("scales",), 1, 0, has_zeros=True, zero_offset=1),
    "gptq v2": Scheme(Layout.GPTQ, ("scales",), 1, 32, has_zeros=True),
    "gptq 8 bits": Scheme(Layout.GPTQ8, ("scales",), 1, 128, has_zeros=True, zero_offset=1),
    "int8 zeros": Scheme(Layout.INT8, ("weight_scale",), 1, 64, has_zeros=True),
    "nvfp4": Scheme(Layout.NVFP4, ("weight_scale",), 0, 0),
    "nvfp4 modelopt": Scheme(Layout.MODELOPT4, ("weight_scale",), 0, 0),
    "fp8 fbgemm": Scheme(Layout.E4M3, ("weight_scale",), 1, 0),
    "fp8 modelopt": Scheme(Layout.E4M3, ("weight_scale",), 0, 0),
}


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_methods_are_read(tmp_path, name):
    found = read(tmp_path, of(name))
    assert found.scheme_of(MODULE) == SCHEMES[name]
    assert found.scheme_of("lm_head") is None
    assert found.rounds_activations == (8 if "fp8" in name else 4 if "modelopt" in name else 0)


def test_a_block_may_be_named_by_text(tmp_path):
    scheme = FLOAT | {"strategy": "block", "block_structure": "64x128"}
    found = read(tmp_path, compressed("float-quantized", scheme)).scheme_of(MODULE)
    assert (found.rows, found.columns) == (64, 128)


def test_a_strategy_follows_from_the_group_size(tmp_path):
    for size, grid in ((None, (0, 0)), (-1, (1, 0)), (64, (1, 64))):
        found = read(tmp_path, weights(strategy=None, group_size=size)).scheme_of(MODULE)
        assert (found.rows, found.columns) == grid


def test_a_config_without_the_field_quantises_nothing(tmp_path):
    assert read(tmp_path, None) is None


@pytest.mark.parametrize(
    ("kept", "is_kept"),
    [
        ([MODULE], True),
        (["model.layers.3"], True),
        (["up_proj"], True),
        (["mlp"], True),
        (["layers.3.mlp"], True),
        (["re:.*up_proj"], True),
        (["model.layers.3.mlp.up"], False),
        (["model.layers.30", "mlp.gate", "gate_proj"], False),
        (["ayers.3", "layers.3.ml", "lp"], False),
        ([], False),
    ],
)
def test_kept_modules_are_named_by_parts_between_dots(tmp_path, kept, is_kept):
    for name in ("fp8 blocks", "awq 32"):
        found = read(tmp_path, of(name, modules_to_not_convert=kept)).scheme_of(MODULE)
        assert (found is None) == is_kept
    # compressed-tensors has no parts and no ends.
    found = read(tmp_path, compressed("float-quantized", FLOAT, ignore=kept))
    whole = any(each in (MODULE, "re:.*up_proj") for each in kept)
    assert (found.scheme_of(MODULE) is None) == whole


REAL_PATTERNS = {
    r"re:.*lm_head": ("lm_head",),
    r"re:model\.layers\.\d+\.mlp\..*": (MODULE,),
    r"re:.*(q|k|v)_proj$": ("model.layers.0.self_attn.v_proj",),
    r"re:vision_tower.*": (),
    r"re:.*mlp.gate$": (),
    r"re:.*\.layers\.\d+\.mlp\.(gate|up|down)_proj": (MODULE,),
    r"re:(model\.)?layers\.(0|3|1[0-9])\.mlp\.(?!down).*": (MODULE,),
}


@pytest.mark.parametrize("pattern", sorted(REAL_PATTERNS))
def test_patterns_of_real_files_are_read(tmp_path, pattern):
    found = read(tmp_path, compressed("float-quantized", FLOAT, ignore=[pattern]))
    modules = (MODULE, "lm_head", "model.layers.0.self_attn.v_proj")
    ignored = tuple(each for each in modules if found.scheme_of(each) is None)
    assert ignored == REAL_PATTERNS[pattern]


# Each would take minutes to years for one name.
SLOW = (
    "re:(.|.)*!",
    "re:(.*)*!",
    "re:((.|.){1,9}){1,9}!",
    "re:" + "(?:.|.)" * 30 + "!",
    "re:" + ".?" * 60 + "!",
    "re:(?:(?=(?:.|.)*!)|.)*",
    "re:" + ".*" * 9 + "!",
)


@pytest.mark.parametrize("number", range(len(SLOW)))
def test_patterns_that_would_take_long_are_refused(tmp_path, number):
    told = "ignore is .*must be patterns; .* may match a name in too many ways"
    with pytest.raises(kccl.Error, match=told) as raised:
        read(tmp_path, compressed("float-quantized", FLOAT, ignore=["lm_head", SLOW[number]]))
    assert "\n" not in str(raised.value)


def test_the_slowest_list_that_is_read_is_fast(tmp_path):
    """It takes some 25 ms."""
    ignored = ["re:.*.*.*.*!"] + [f"re:.*{number}.*!" for number in range(700)]
    found = read(tmp_path, compressed("float-quantized", FLOAT, ignore=ignored))
    start = time.process_time()
    for layer in range(16):
        assert found.scheme_of(f"model.layers.{layer}.self_attn.q_proj") is not None
    assert time.process_time() - start < 0.5
    with pytest.raises(kccl.Error, match="must be at most 2000 names and simple patterns"):
        read(tmp_path, compressed("float-quantized", FLOAT, ignore=[*ignored, ignored[0]]))
    groups = {
        str(number): {"targets": [f"re:.*.*.*.*{number}"], "weights": FLOAT} for number in range(2)
    }
    with pytest.raises(kccl.Error, match=r"config_groups is .* at most 2000 names and simple"):
        read(tmp_path, compressed("float-quantized", FLOAT, config_groups=groups))
    with pytest.raises(kccl.Error, match=r"not_convert is .* at most 2000 names and simple"):
        read(tmp_path, of("awq 32", modules_to_not_convert=["a"] * 2001))


def test_the_head_of_fp8_is_quantised_if_a_list_does_not_name_it(tmp_path):
    for name in ("modules_to_not_convert", "ignored_layers"):
        for listed, is_kept in (([], False), (["up_proj"], False), (["lm_head"], True)):
            found = read(tmp_path, of("fp8 blocks", **{name: listed}))
            assert (found.scheme_of("lm_head") is None) == is_kept
    # AWQ and GPTQ have a field for it.
    assert read(tmp_path, of("awq 32", modules_to_not_convert=[])).scheme_of("lm_head") is None
    assert read(tmp_path, of("gptq 64", lm_head=True)).scheme_of("lm_head") is not None


def test_the_layout_has_an_old_and_a_new_name(tmp_path):
    assert read(tmp_path, of("gptq 64", format="gptq_v2")).scheme_of(MODULE).zero_offset == 0
    both = of("gptq 64", format="gptq", checkpoint_format="gptq")
    assert read(tmp_path, both).scheme_of(MODULE).zero_offset == 1
    assert read(tmp_path, of("awq 32", format="gemm")).scheme_of(MODULE) is not None


REFUSED = {
    "method": ({"quant_method": "bitsandbytes"}, "config.quant_method is 'bitsandbytes', must be"),
    "no method": ({}, "field quantization_config.quant_method is missing"),
    "mxfp4": ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4', must be another one: gpt"),
    "activations": (of("fp8 blocks", activation_scheme="a"), "activation_scheme is 'a', must be"),
    "e5m2": (of("fp8 blocks", fmt="e5m2"), "fmt is 'e5m2', must be 'e4m3'"),
    "block": (of("fp8 blocks", weight_block_size=[128, 100]), "second size is a multiple of 32"),
    "block of one": (of("fp8 blocks", weight_block_size=[128]), "two sizes above 0"),
    "cache": (group() | {"kv_cache_scheme": {"num_bits": 8}}, "config.kv_cache_scheme is .*absent"),
    "sparse": (group() | {"sparsity_config": {"format": "24"}}, "sparsity_config.format is '24'"),
    "transform": (group() | {"transform_config": {"a": 1}}, "transform_config is .*absent"),
    "groups of mxfp4": (
        compressed("mxfp4-pack-quantized", FLOAT4 | {"group_size": 64}),
        "group_size is 64, must be 32 where the format is mxfp4-pack-quantized",
    ),
    "groups of nvfp4": (
        compressed("nvfp4-pack-quantized", NVFLOAT4 | {"group_size": 32}),
        "group_size is 32, must be 16 where the format is nvfp4-pack-quantized",
    ),
    "modelopt": (of("fp8 modelopt", quant_algo="W4A8"), "quant_algo is 'W4A8', must be one of FP8"),
    "modelopt groups": (of("nvfp4 modelopt", group_size=32), "group_size is 32, must be 16 where"),
    "modelopt cache": (of("fp8 modelopt", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is"),
    "own format": (group(format="marlin-24"), "group_0.format is 'marlin-24'"),
    "output": (group(output_activations={"num_bits": 8}), "group_0.output_activations is"),
    "input": (
        group(input_activations={"dynamic": "never"}),
        "group_0.input_activations.dynamic is 'never', must be true, false or 'local'",
    ),
    "no groups": (group() | {"config_groups": {}}, "config_groups is {}, must be groups"),
    "bits": (weights(num_bits=3), "weights.num_bits is 3, must be 4 of type 'int' or 8 of type"),
    "type": (weights(type="float"), "weights.num_bits is 4, must be 4 of type 'int'"),
    "group size": (weights(group_size=48), "group_size is 48, must be a multiple of 32"),
    "group size beyond": (
        weights(group_size=1 << 70),
        "size is 118.*, must be a multiple of 32 be",
    ),
    "strategy": (weights(strategy="token"), "strategy is 'token', must be"),
    "asymmetric": (group(weights=FLOAT | {"symmetric": False}), "symmetric is False, must be true"),
    "dynamic weights": (weights(dynamic=True), "weights.dynamic is True, must be false"),
    "pattern": (group(targets=["re:("]), r"group_0.targets is .*re:\( is no regular expression"),
    "pattern ignored": (group() | {"ignore": ["re:*"]}, "config.ignore is .*no regular expression"),
    "pattern behind": (group(targets=["re:.*(?<=a*)b"]), "a[*]\\)b is no regular expression"),
    "awq bits": (of("awq 32", bits=8), "bits is 8, must be 4"),
    "awq order": (of("awq 32", version="gemv"), "version is 'gemv', must be 'gemm'"),
    "awq zeros": (of("awq 32", zero_point=False), "zero_point is False, must be true"),
    "gptq bits": (of("gptq 64", bits=3), "bits is 3, must be 4 or 8"),
    "gptq form": (of("gptq 64", checkpoint_format="marlin"), "checkpoint_format is 'marlin'"),
    "gptq new form": (of("gptq 64", format="marlin"), "config.format is 'marlin', must be 'gptq'"),
    "gptq forms": (of("gptq 64", format="gptq", checkpoint_format="gptq_v2"), "mean the same and"),
    "awq new order": (of("awq 32", format="gemv"), "config.format is 'gemv', must be 'gemm'"),
    "gptq layers": (of("gptq 64", dynamic={"-:.*": {}}), "config.dynamic is .*absent"),
    "text": ("fp8", "quantization_config is 'fp8', must be an object"),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_what_is_not_honoured_is_refused_by_name(tmp_path, what):
    quantization, told = REFUSED[what]
    with pytest.raises(kccl.Error, match=told) as raised:
        read(tmp_path, quantization)
    assert str(tmp_path / "config.json") in str(raised.value) and "\n" not in str(raised.value)


def test_two_schemes_of_one_target_are_refused(tmp_path):
    made = compressed("pack-quantized", INT4 | {"group_size": 32})
    made["config_groups"]["b"] = {"targets": ["Linear"], "weights": INT4 | {"group_size": 64}}
    with pytest.raises(kccl.Error, match=r"b.targets is .*without Linear, which another group has"):
        read(tmp_path, made)


def test_a_target_that_is_no_layer_is_refused(tmp_path):
    for target in ("Embedding", "LlamaAttention", "model.layers.9.mlp.up_proj"):
        found = read(tmp_path, group(targets=["Linear", target]))
        with pytest.raises(kccl.Error, match=f"has the target {target}, must be 'Linear'"):
            found.check_targets({MODULE})
    read(tmp_path, group(targets=["Linear", MODULE, "re:nothing"])).check_targets({MODULE})


def test_a_laneformer_has_no_quantised_weights(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LANEFORMER | {"quantization_config": of("fp8 blocks")}))
    with pytest.raises(kccl.Error, match=r"quantization_config is .*absent in a Laneformer"):
        read_config(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
VALUES = JSON | st.sampled_from(
    [-1, 0, 4, 8, 64, "group", "re:(a", "re:.*", ["Linear"], ["re:["], [128, 128], 1 << 70, "9x9x"]
)


def places(value, at=()):
    """The places of all fields in nested objects."""
    found = [at]
    if isinstance(value, dict):
        for name, inner in value.items():
            found += places(inner, (*at, name))
    return found


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_field_is_refused_or_honoured(tmp_path, data):
    """Any field may have any value. There is no exception but the engine's, and it has one line."""
    name = data.draw(st.sampled_from(sorted(LAYOUTS)))
    whole = {"quantization_config": copy.deepcopy(LAYOUTS[name][0])}
    for _ in range(data.draw(st.integers(1, 3))):
        *way, last = data.draw(st.sampled_from(places(whole)[1:]))
        inner = whole
        for step in way:
            inner = inner.get(step) if isinstance(inner, dict) else None
        if isinstance(inner, dict):
            inner[last] = data.draw(VALUES)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | whole))
    try:
        found = read_quantization(path)
        if found is not None:
            found.check_targets({MODULE})
            assert found.scheme_of(MODULE) is None or found.scheme_of(MODULE).columns % 32 == 0
    except kccl.Error as error:
        assert "\n" not in str(error) and str(path) in str(error)
