"""Folders with quantised weights: the numbers, the executors, and what is wrong with a file."""

import json

import numpy as np
import pytest
from quantized_folders import LAYOUTS, MODEL, tensors_of, write_folder, write_tensors

import kccl
from kccl.engine import Engine
from kccl.engine.diff import Diff
from kccl.engine.executors.opening import read_for, rounding
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.hf import LAYER_NAMES
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.formats.groups import Groups
from kccl.engine.formats.nvfp4 import Nvfp4
from kccl.engine.formats.table import ON_HOST

IDS = np.random.default_rng(1).integers(48, size=21).tolist()
OWN_NAMES = {name.removesuffix(".weight"): own for own, name in LAYER_NAMES.items()}
GROUPS = [name for name, each in ON_HOST.items() if isinstance(each, Groups | Nvfp4)]
# One layout of each kind, where all would be slow.
KINDS = ("fp8 blocks", "fp8 compressed rows", "int8 rows", "int4 128", "awq 32", "gptq 64")
KINDS += ("int8 zeros", "mxfp4 e8m0", "nvfp4 modelopt")
UP = "model.layers.0.mlp.up_proj"
KEY = "model.layers.{}.self_attn.k_proj"
NOTICE = "activations stay in FP32, though the model asks for {} bits before each product"


def own_name(layer):
    """The engine's name of a layer's matrix."""
    _, _, number, part = layer.split(".", 3)
    return f"layers.{number}.{OWN_NAMES['model.layers.{}.' + part]}"


def read_all(checkpoint, layer):
    """A matrix as the file has it, without lanes."""
    name = own_name(layer)
    read = checkpoint.read(name).to_float32()
    if name.endswith(("wo", "w2")):
        read = read.transpose(1, 0, 2)
    return read.reshape(-1, read.shape[-1] * (read.shape[1] if name.endswith(("wo", "w2")) else 1))


def _sizes_of(form, group):
    """The formats of lanes of 128 columns, and of 64."""
    if form == "mxfp4":
        return form, form
    if form == "nvfp4":
        # Its scales are those of the file, whatever the groups.
        return "nvfp4_128", "nvfp4_32"
    sizes = (128, 64, 32) if form.startswith("int4") else (128, 32)
    fitting = [f"{form}_{each}" for each in sizes if group % each == 0]
    return fitting[0], next(each for each in fitting if not each.endswith("_128"))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_numbers_are_those_that_the_file_means(tmp_path, name):
    tensors, meant = tensors_of(name)
    folder = write_folder(tmp_path / "m", name, tensors)
    form = LAYOUTS[name][2]
    with open_checkpoint(folder) as checkpoint:
        kept = checkpoint.as_stored(ON_HOST)
        for layer, weights in meant.items():
            np.testing.assert_array_equal(read_all(kept, layer), weights)
        # One lane alone, of rows and of columns.
        for part, axis in (("up_proj", 0), ("down_proj", 1)):
            lane = kept.read(own_name(f"model.layers.1.mlp.{part}"), range(1, 2)).to_float32()[0]
            whole = meant[f"model.layers.1.mlp.{part}"]
            np.testing.assert_array_equal(lane, np.split(whole, 2, axis=axis)[1])
    group = LAYOUTS[name][0].get("group_size") or 128
    if "config_groups" in LAYOUTS[name][0]:
        group = LAYOUTS[name][0]["config_groups"]["group_0"]["weights"].get("group_size", 128)
    # A lane has 64 columns of the output projection.
    wide, narrow = _sizes_of(form, 128 if group == -1 else group)
    assert (kept.formats["gate_up"].name, kept.formats["out"].name) == (wide, narrow)
    assert {each.name for each in kept.formats.values()} == {wide, narrow, "bfloat16"}


@pytest.mark.parametrize("name", KINDS)
def test_every_op_is_the_references(tmp_path, name):
    tensors, _ = tensors_of(name)
    folder = write_folder(tmp_path / "m", name, tensors)
    rounds = name.startswith("fp8") or name in ("int8 rows", "mxfp4 e8m0", "nvfp4 modelopt")
    notice = NOTICE.format(4 if "modelopt" in name else 8)
    with open_checkpoint(folder) as checkpoint:
        found = []
        for ranks, blocks in ((1, 1), (2, 2)):
            with Engine(checkpoint, ranks=ranks, blocks=blocks) as engine:
                found.append(engine.logits(IDS))
                assert engine.notices == ((notice,) if rounds else ())
                if ranks == 2:
                    assert all(each.is_within(None) for each in Diff(checkpoint, engine, IDS).all())
        exact = Reference(checkpoint.as_stored(ON_HOST)).logits(IDS)
        rounded = Reference(checkpoint).logits(IDS)
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
    assert np.abs(found[0] - exact).max() < 1e-4
    if "fp4" in name:
        # BF16 holds each of these weights exactly. NVFP4's factor is a power of two here.
        np.testing.assert_array_equal(rounded, exact)
        return
    # Scales in BF16 may make numbers that BF16 has.
    assert np.abs(found[0] - rounded).max() > 5 * np.abs(found[0] - exact).max()


@pytest.mark.parametrize("name", GROUPS)
def test_tables_and_heads_in_groups(name):
    """The formats' own rounding, their rows as an embedding, and some columns at a time."""
    matrices = ("wq", "wk", "wv", "wo", "w1", "w3", "w2", "embedding", "head")
    shape = {"hidden": 128, "ffn": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32}
    shape |= {"num_layers": 1, "num_lanes": 2}
    checkpoint = random_checkpoint("tiny-llama", stored=dict.fromkeys(matrices, name), **shape)
    with Engine(checkpoint, ranks=2) as engine:
        assert {each.name for each in engine.formats.values()} == {name}
        logits = engine.logits(IDS)
        np.testing.assert_array_equal(engine.logits(IDS[:2]), logits[:2])
        assert all(each.is_within(None) for each in Diff(checkpoint, engine, IDS[:9]).all())
    # BF16 has 8 bits of a number, and the format has fewer.
    weights = random_checkpoint("tiny-llama", **shape).tensor("layers.0.wq").astype(np.float32)
    error = checkpoint.as_stored(ON_HOST).tensor("layers.0.wq") - weights
    assert np.abs(error).max() < np.abs(weights).max() * (
        0.2 if "fp4" in name else 0.1 if "int4" in name else 0.04
    )


def test_layers_that_are_ignored_stay_as_they_are(tmp_path):
    """By name, by pattern and by a part of the model."""
    name = "fp8 compressed rows"
    ignored = ["model.layers.0.mlp.down_proj", r"re:.*layers\.1\.self_attn", "lm_head"]
    without = ["model.layers.0.mlp.down_proj"]
    without += [f"model.layers.1.self_attn.{each}_proj" for each in "qkvo"]
    tensors, _ = tensors_of(name, without=without)
    folder = write_folder(tmp_path / "m", name, tensors, ignore=ignored)
    with open_checkpoint(folder) as checkpoint, Engine(checkpoint) as engine:
        formats = {op: each.name for op, each in engine.formats.items()}
        assert all(each.is_within(None) for each in Diff(checkpoint, engine, IDS[:5]).all())
    usual = dict.fromkeys(("embed", "qkv", "out", "down", "head"), "bfloat16")
    own = {"layers.0.qkv": "e4m3_128", "layers.0.out": "e4m3_32", "layers.1.down": "e4m3_128"}
    assert formats == usual | {"gate_up": "e4m3_128"} | own
    # AWQ's list names parts of the model.
    tensors, _ = tensors_of("awq 32", without=without[1:])
    kept = {"modules_to_not_convert": ["model.layers.1.self_attn"]}
    with open_checkpoint(write_folder(tmp_path / "n", "awq 32", tensors, **kept)) as checkpoint:
        assert checkpoint.as_stored(ON_HOST).formats["layers.0.qkv"].name == "int4_zeros_32"


def test_groups_may_have_schemes_of_their_own(tmp_path):
    """A pattern is taken before a class, and a name before a pattern."""
    eights, _ = tensors_of("int8 packed")
    tensors, _ = tensors_of("int4 32")
    for layer in ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"):
        own = {name: each for name, each in eights.items() if name.startswith(layer)}
        tensors = {name: each for name, each in tensors.items() if not name.startswith(layer)} | own
    four, eight = (
        LAYOUTS[each][0]["config_groups"]["group_0"] for each in ("int4 32", "int8 packed")
    )
    groups = {
        "a": four | {"targets": ["Linear", "re:.*layers.1.mlp.d"]},
        "b": eight | {"targets": ["re:.*layers.0.mlp.down", "model.layers.1.mlp.down_proj"]},
    }
    folder = write_folder(tmp_path / "m", "int4 32", tensors, config_groups=groups)
    with open_checkpoint(folder) as checkpoint:
        formats = checkpoint.as_stored(ON_HOST).formats
    assert formats["down"].name == "int8_128" and formats["gate_up"].name == "int4_32"


def test_scales_may_be_in_another_file(tmp_path):
    tensors, meant = tensors_of("fp8 blocks")
    folder = write_folder(tmp_path / "m", "fp8 blocks", tensors)
    (folder / "model.safetensors").unlink()
    parts = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        parts["b.safetensors" if name.endswith("scale_inv") else "a.safetensors"][name] = tensor
    weight_map = {name: file for file, own in parts.items() for name in own}
    for file, own in parts.items():
        write_tensors(folder / file, own)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with open_checkpoint(folder) as checkpoint:
        found = read_all(checkpoint.as_stored(ON_HOST), UP)
    np.testing.assert_array_equal(found, meant[UP])


def test_the_packed_weights_take_the_files_bytes(tmp_path):
    config = MODEL | {"num_hidden_layers": 1, "head_dim": 64}
    for name, most in (
        *(("fp8 blocks", 1.05), ("int4 128", 1.05), ("awq 128", 1.05)),
        *(("nvfp4", 1.06), ("gptq 8 bits", 1.04)),
    ):
        tensors, _ = tensors_of(name, config)
        folder = write_folder(tmp_path / name, name, tensors, config)
        stored = sum(each.nbytes for at, each in tensors.items() if "norm" not in at)
        with Engine(folder, tokenizer=False) as engine:
            assert engine.nbytes <= most * stored


@pytest.mark.parametrize(
    ("name", "stored", "kept", "bits"),
    [
        ("fp8 blocks", "F8_E4M3", ("e4m3_128", "e4m3_32"), [8]),
        ("int8 rows", "INT8", ("int8_128", "int8_32"), [8]),
        ("int4 128", "INT4", ("int4_128", "int4_64"), []),
        ("awq 32", "INT4+zero", ("int4_zeros_32",), []),
    ],
)
def test_gpus_multiply_them_and_amds_if_they_are_of_one_form(tmp_path, name, stored, kept, bits):
    notices = [NOTICE.format(each) for each in bits]
    with open_checkpoint(write_folder(tmp_path / "m", name, tensors_of(name)[0])) as checkpoint:
        for backend in ("cuda", "sim", "hip"):
            read = read_for(checkpoint, backend, None)
            expands = backend == "hip" and len(kept) > 1
            found = {"bfloat16"} if expands else {"bfloat16", *kept}
            assert {each.name for each in read.formats.values()} == found
            told = [f"weights are rounded from {stored} to bfloat16"] if expands else []
            assert rounding(read) == [*notices, *told]


def test_a_notice_names_a_tensor_that_the_file_has(tmp_path):
    """Gate and up have two formats, so both become BF16."""
    tensors, _ = tensors_of("int4 32")
    others, _ = tensors_of("int8 packed")
    tensors = {name: each for name, each in tensors.items() if not name.startswith(UP)}
    tensors |= {name: each for name, each in others.items() if name.startswith(UP)}
    four, eight = (
        LAYOUTS[each][0]["config_groups"]["group_0"] for each in ("int4 32", "int8 packed")
    )
    groups = {"a": four, "b": eight | {"targets": [UP]}}
    folder = write_folder(tmp_path / "m", "int4 32", tensors, config_groups=groups)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.stored == ("BF16", "INT4", "INT8")
        read = read_for(checkpoint, "host", None)
        assert read.rounded == ("INT4", "INT8")
        told = "takes 16 bits a weight: a product has matrices of several formats, as in"
        gate = UP.replace("up", "gate")
        assert sorted(read.expanded) == [
            f"INT4 {told} {gate}.weight_packed",
            f"INT8 {told} {UP}.weight_packed",
        ]


def test_queries_keys_and_values_may_have_three_formats(tmp_path):
    tensors, _ = tensors_of("int4 32 zeros")
    others, _ = tensors_of("int8 packed")
    plain, _ = tensors_of("int8 packed", without=[KEY.format(layer) for layer in range(2)])
    for own, part in ((plain, "k_proj"), (others, "v_proj")):
        tensors = {name: each for name, each in tensors.items() if part not in name}
        tensors |= {name: each for name, each in own.items() if part in name}
    four, eight = (
        LAYOUTS[each][0]["config_groups"]["group_0"] for each in ("int4 32 zeros", "int8 packed")
    )
    groups = {"a": four, "b": eight | {"targets": ["re:.*v_proj"]}}
    ignored = ["lm_head", "re:.*k_proj"]
    folder = write_folder(tmp_path / "m", "int4 32", tensors, config_groups=groups, ignore=ignored)
    found = []
    with open_checkpoint(folder) as checkpoint:
        for ranks, blocks in ((1, 1), (2, 2), (1, 3)):
            with Engine(checkpoint, ranks=ranks, blocks=blocks) as engine:
                formats = {op: each.name for op, each in engine.formats.items()}
                found.append(engine.logits(IDS).view(np.uint32))
                assert all(each.is_within(None) for each in Diff(checkpoint, engine, IDS[:9]).all())
    assert [formats[each] for each in ("qkv", "layers.0.wk", "layers.1.wv")] == [
        *("int4_zeros_32", "bfloat16", "int8_128")
    ]
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


# ---- what is wrong ------------------------------------------------------------------------------


def spoilt(part, change):
    """Changes one tensor of one layer; None: it is left out."""

    def spoil(tensors):
        name = f"{UP}.{part}"
        array = tensors.pop(name)
        made = change(array.copy())
        if made is not None:
            tensors[name] = made

    return spoil


def put(value):
    def change(array):
        array[(0,) * array.ndim] = value
        return array

    return change


WRONG = {
    "no scale": ("fp8 blocks", spoilt("weight_scale_inv", lambda a: None), "scale_inv is missing"),
    "no packed": ("int4 32", spoilt("weight_packed", lambda a: None), "weight_packed is missing"),
    "no zeros": ("awq 32", spoilt("qzeros", lambda a: None), "up_proj.qzeros is missing"),
    "zero": ("fp8 compressed rows", spoilt("weight_scale", put(0)), "weight_scale has the scale 0"),
    "one zero": ("fp8 tensor", spoilt("weight_scale", put(0)), "weight_scale has the scale 0"),
    "negative": ("int8 rows", spoilt("weight_scale", put(-1)), "weight_scale has the scale -1"),
    "nan": ("int4 128", spoilt("weight_scale", put(np.nan)), "weight_scale has the scale nan"),
    "zero of 16": ("nvfp4", spoilt("weight_scale", put(0)), "weight_scale has the scale 0"),
    "nan of 16": ("nvfp4", spoilt("weight_scale", put(0x7F)), "weight_scale has the scale nan"),
    "no divisor": ("nvfp4", spoilt("weight_global_scale", lambda a: None), "scale is missing"),
    "zero divisor": ("nvfp4", spoilt("weight_global_scale", put(0)), "global_scale has the scale"),
    "nan factor": ("nvfp4 modelopt", spoilt("weight_scale_2", put(np.nan)), "has the scale nan"),
    "scales of 32": (
        "nvfp4",
        spoilt("weight_scale", lambda a: a[:, ::2].copy()),
        r"weight_scale has shape \[256, 4\], must have \[256, 8\]",
    ),
    "infinite": ("gptq 64", spoilt("scales", put(np.inf)), "scales has the scale inf"),
    "too large": ("fp8 tensor", spoilt("weight_scale", put(1e37)), "has the scale 1e[+]37"),
    "nan weight": ("fp8 tensor", spoilt("weight", put(0x7F)), "has a weight that is NaN"),
    "bytes": (
        "fp8 blocks",
        spoilt("weight", lambda a: a.view(np.int8)),
        "up_proj.weight has dtype I8, must be F8_E4M3",
    ),
    "not quantised": (
        "fp8 tensor",
        spoilt("weight", lambda a: a.astype(np.float32)),
        "up_proj.weight has dtype F32, must be F8_E4M3",
    ),
    "scales of integers": (
        "int8 rows",
        spoilt("weight_scale", lambda a: a.astype(np.int32)),
        "weight_scale has dtype I32, must be one of BF16, F16, F32",
    ),
    "grid": (
        "fp8 blocks",
        spoilt("weight_scale_inv", lambda a: a[:1]),
        r"weight_scale_inv has shape \[1, 1\], must have \[2, 1\]",
    ),
    "rows": (
        "int8 rows",
        spoilt("weight_scale", lambda a: a[1:]),
        r"weight_scale has shape \[255, 1\], must have \[256, 1\] or \[256\]",
    ),
    "groups": (
        "int4 32",
        spoilt("weight_scale", lambda a: a[:, :2].copy()),
        r"weight_scale has shape \[256, 2\], must have \[256, 4\]",
    ),
    "shape": (
        "int4 32",
        spoilt("weight_shape", put(255)),
        r"weight_shape has \[255, 128\], must have \[256, 128\]",
    ),
    "order": (
        "gptq 64",
        spoilt("g_idx", lambda a: a[::-1].copy()),
        "g_idx has groups whose columns do not lie side by side",
    ),
    "more": (
        "fp8 tensor",
        lambda tensors: tensors.update({f"{UP}.pre_quant_scale": np.ones(1, np.float32)}),
        "up_proj.pre_quant_scale is not part of a llama model",
    ),
    "bias": (
        "gptq 64",
        lambda tensors: tensors.update({f"{UP}.bias": np.ones(256, np.float16)}),
        "up_proj.bias has a bias that is not 0, and the model has none",
    ),
    "zero points": (
        "int8 rows",
        lambda tensors: tensors.update({f"{UP}.weight_zero_point": np.ones((256, 1), np.int8)}),
        "weight_zero_point has a zero point that is not 0",
    ),
}


@pytest.mark.parametrize("what", sorted(WRONG))
def test_what_is_wrong_is_said_in_one_line(tmp_path, what):
    name, spoil, told = WRONG[what]
    config = MODEL | {"num_hidden_layers": 1}
    tensors, _ = tensors_of(name, config)
    spoil(tensors)
    folder = write_folder(tmp_path / "m", name, tensors, config)
    with pytest.raises(kccl.Error, match=told) as raised:
        Engine(folder, tokenizer=False)
    assert UP in str(raised.value) and "\n" not in str(raised.value)


def test_rows_must_have_whole_groups(tmp_path):
    config = MODEL | {"num_hidden_layers": 1, "intermediate_size": 200}
    tensors, _ = tensors_of("fp8 tensor", config)
    folder = write_folder(tmp_path / "m", "fp8 tensor", tensors, config)
    told = r"mlp.down_proj.weight has 200 columns, must have a multiple of 32 to be quantised"
    with pytest.raises(kccl.Error, match=told):
        open_checkpoint(folder)


def test_an_ignored_layer_must_not_be_quantised(tmp_path):
    tensors, _ = tensors_of("fp8 tensor")
    kept = {"modules_to_not_convert": [UP]}
    folder = write_folder(tmp_path / "m", "fp8 tensor", tensors, **kept)
    with pytest.raises(kccl.Error, match=r"up_proj.weight has dtype F8_E4M3, must be one of BF16"):
        open_checkpoint(folder)
