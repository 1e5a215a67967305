"""GGUF's formats that become others while they are read: Q2_K, Q3_K, IQ and TQ types."""

import gguf
import numpy as np
import pytest
from tiny_models import gguf_shapes, write_gguf

import kccl
from kccl.engine import Engine
from kccl.engine.diff import Diff
from kccl.engine.executors.opening import read_for, rounding
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.kept import kept_formats
from kccl.engine.formats.base import Stored
from kccl.engine.formats.bfloat16 import BFLOAT16
from kccl.engine.formats.table import IN_FILES, MULTIPLIED, ON_HOST, forms_of
from kccl.engine.model.sample import SamplingParams

# Format -> the byte offsets of its FP16 numbers. IQ1_M's lies in the upper bits of its last words.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "IQ1_S": (0,), "IQ1_M": (), "IQ2_XXS": (0,)}
HALVES |= {"IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,)}
HALVES |= {"IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,)}
ROUNDED = ("Q2_K", "IQ2_XS", "IQ2_S")
# One layer more than in test_gguf.py, so that there is a matrix for each format.
SHAPE = {"hidden": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 128, "layers": 2}
SHAPE |= {"vocab": 304}
# The first and the second layer. Gate and up are one product, which has one form.
KINDS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
PRODUCTS = ("qkv", "out", "gate_up", "down")
LAYERS = (
    ("IQ1_S", "IQ2_S", "IQ3_S", "Q3_K", "Q2_K", "IQ2_XS", "IQ4_XS"),
    ("IQ1_M", "IQ2_XXS", "IQ4_NL", "TQ1_0", "IQ3_XXS", "IQ1_S", "TQ2_0"),
)
# As in test_monokernel.py, where logits are near 1: the KV cache is f16.
TOLERANCE = 3e-3
IDS = [5, 99, 17, 64, 200, 3]
INT8 = "rounded by at most 1/254 of the largest of 32 weights"


def with_factors(name, blocks, factors):
    """Replaces the FP16 numbers of blocks."""
    bits = factors.astype(np.float16).view(np.uint16)[:, None]
    for at in HALVES[name]:
        blocks[:, at : at + 2] = bits.view(np.uint8)
    if name == "IQ1_M":
        words = blocks[:, 48:].view(np.uint16)
        words &= 0x0FFF
        words |= (bits >> np.array([0, 4, 8, 12], np.uint16)) << 12
    return blocks


def random_blocks(shape, name, seed=0):
    """Blocks with weights such as a model of this width has."""
    stored_in, random = IN_FILES[name], np.random.default_rng(seed)
    blocks = random.integers(256, size=(np.prod(shape) // stored_in.block, stored_in.words))
    blocks = with_factors(name, blocks.astype(np.uint8), np.ones(len(blocks)))
    rms = np.sqrt(np.mean(stored_in.to_float32(blocks) ** 2))
    factors = random.uniform(0.5, 1.5, len(blocks)) / (16 * rms)
    blocks = with_factors(name, blocks, factors)
    if name == "Q2_K":
        # Minimums are such that the mean is near 0.
        blocks[:, 82:84] = (1.5 * factors).astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def write(path, types, **changes):
    """Writes a model whose matrices have such types: name -> type."""
    tensors, shape = {}, SHAPE | changes
    for name, size in gguf_shapes(shape, "llama").items():
        each = types.get(name.removesuffix(".weight"))
        if each in HALVES:
            words = random_blocks(size, each)
        elif each is not None:
            values = np.random.default_rng(0).standard_normal(size, np.float32)
            words = IN_FILES[each].from_values(values)
        if each is not None:
            tensors[name] = words, gguf.GGMLQuantizationType[each]
    write_gguf(path, tensors=tensors, **shape)


def families(stored_in):
    for form in stored_in.forms:
        yield from ((form, each) for each in (form, form.cut, *forms_of(form)) if each is not None)


@pytest.mark.parametrize("name", HALVES)
def test_numbers_are_those_of_the_file(name):
    stored_in = IN_FILES[name]
    stored = Stored(stored_in, random_blocks((4, 4096), name))
    wanted = stored.to_float32()
    largest = np.abs(wanted).reshape(-1, 32).max(axis=1)
    for form, each in families(stored_in):
        found = stored.turned_into(each)
        assert found.format is each and found.shape == wanted.shape and each.is_finite(found.words)
        error = np.abs(found.to_float32() - wanted)
        if stored_in.rounding(form) == INT8:
            assert (
                error.reshape(-1, 32).max(axis=1) <= 1.001 / 254 * largest
            ).all() and error.any()
        else:
            assert not error.any()
        num_bits = 8 * found.words.nbytes / wanted.size
        assert num_bits <= 9
    assert (stored_in.rounding(stored_in.forms[0]) == INT8) == (name in ROUNDED)


@pytest.mark.parametrize("name", ["IQ1_S", "IQ1_M", "IQ3_XXS"])
def test_the_smallest_factors_may_lose_bits_in_fp16(name):
    """Half a unit of FP16's smallest numbers, times the largest scale and integer."""
    stored_in = IN_FILES[name]
    power = {"IQ3_XXS": 1}.get(name, 3)
    assert f"2**-14 loses up to {power} bits" in stored_in.rounding(IN_FILES["Q6_K"])
    blocks = random_blocks((64, 256), name)
    factors = np.random.default_rng(1).uniform(2.0**-14, 2.0**-12, len(blocks))
    stored = Stored(stored_in, with_factors(name, blocks, factors))
    wanted = stored.to_float32()
    error = np.abs(stored.turned_into(IN_FILES["Q6_K"]).to_float32() - wanted)
    assert error.any() and error.max() <= 2.0**-25 * {"IQ3_XXS": 31 * 31}.get(name, 15 * 9)
    if name != "IQ1_M":
        exact = stored.turned_into(IN_FILES["INT8/32"])
        np.testing.assert_array_equal(exact.to_float32(), wanted)


def test_host_and_reference_agree_on_a_model_of_all_types(tmp_path):
    path = tmp_path / "m.gguf"
    types = {
        f"blk.{layer}.{kind}": each
        for layer, kinds in enumerate(LAYERS)
        for kind, each in zip(KINDS, kinds, strict=True)
    }
    assert set(types.values()) == set(HALVES)
    write(path, types | {"token_embd": "Q2_K"})
    logits = []
    with open_checkpoint(path) as checkpoint:
        kept = read_for(checkpoint, "host", None)
        reference = Reference(kept)
        tokens = [t for t, _ in reference.generate(IDS, SamplingParams(max_tokens=8))]
        for ranks in (1, 2):
            with Engine(checkpoint, ranks=ranks) as engine:
                logits.append(engine.logits(IDS))
                found = engine.generate(IDS, SamplingParams(max_tokens=8)).ids
                formats, notices = engine.formats, engine.notices
                nbytes = engine.nbytes
                differences = list(Diff(checkpoint, engine, IDS).all())
        values = kept.read("layers.0.w2").to_float32().transpose(1, 0, 2).reshape(256, 256)
    assert found == tokens
    assert all(each.is_within(None) for each in differences)
    np.testing.assert_array_equal(logits[0].view(np.uint32), logits[1].view(np.uint32))
    np.testing.assert_array_equal(
        values, IN_FILES["IQ4_XS"].to_float32(random_blocks((256, 256), "IQ4_XS"))
    )
    # The others are those of kinds of ops whose layers differ.
    names = {each.name for each in formats.values()}
    assert names - {"bfloat16"} == {"int8_32", "q6_k", "q8_0", "q4_0"}
    # Seven matrices a layer, and the embedding twice: as rows and as the head.
    weights = sum(np.prod(size) for size in gguf_shapes(SHAPE, "llama").values() if len(size) > 1)
    assert nbytes <= 9.1 / 8 * (weights + 304 * 256)
    assert "Q3_K is read as Q6_K, without rounding, as in blk.0.attn_output.weight" in notices
    assert f"Q2_K is read as INT8, {INT8}, as in token_embd.weight" in notices
    assert not any("16 bits" in each for each in notices)


# Files as llama.cpp mixes types: types of kinds of matrices, types of the second layer's that
# differ, and the forms of qkv, out, gate_up and down on GPUs. A lane has 128 columns of ffn_down.
MIXED = {
    "Q3_K_M": (
        dict.fromkeys(KINDS, "Q3_K") | {"attn_output": "Q4_K"},
        {"attn_v": "Q5_K", "ffn_down": "Q5_K"},
        ["nested6_256", "nested4_256", "int8_32", "nested6_64"],
    ),
    "Q2_K": (
        dict.fromkeys(KINDS, "Q2_K") | dict.fromkeys(("attn_v", "attn_output"), "Q3_K"),
        {},
        ["int8_32"] * 4,
    ),
    "IQ3_XXS": (
        dict.fromkeys(KINDS, "IQ3_XXS") | {"attn_output": "IQ3_S"},
        {"ffn_down": "Q4_K"},
        ["int8_32", "int8_32", "int8_32", "nested6_64"],
    ),
    # Integers of 8 bits would round it.
    "IQ1_M": (dict.fromkeys(KINDS, "IQ1_M"), {}, [*["nested6_256"] * 3, "nested6_64"]),
    "TQ1_0": (dict.fromkeys(KINDS, "TQ1_0"), {}, ["q4_0"] * 4),
}


@pytest.mark.parametrize("which", MIXED)
def test_a_product_has_one_form_on_gpus(tmp_path, which):
    first, others, forms = MIXED[which]
    types = {f"blk.0.{kind}": each for kind, each in first.items()}
    types |= {f"blk.1.{kind}": each for kind, each in (first | others).items()}
    path = tmp_path / "m.gguf"
    write(path, types)
    with open_checkpoint(path) as checkpoint:
        read = read_for(checkpoint, "cuda", None)
        assert [read.formats[kind].name for kind in PRODUCTS] == forms
        assert not any("16 bits" in each for each in rounding(read))
        if which == "Q3_K_M":
            host = read_for(checkpoint, "host", None)
            for name in ("wq", "wv", "wo", "w2"):
                one, other = (c.read(f"layers.1.{name}").to_float32() for c in (read, host))
                np.testing.assert_array_equal(one, other)


def test_experts_in_q3_k_become_8_bits_on_gpus():
    """Forms of 6 bits are not tested with experts there. The host has Q6_K."""
    name = "layers.0.experts.0.w2"
    of_file, shapes = {name: IN_FILES["Q3_K"]}, {name: (1, 256, 256)}
    for keeps, is_alike, form in ((ON_HOST, False, "q6_k"), (MULTIPLIED, True, "int8_32")):
        found = kept_formats(of_file, shapes, BFLOAT16, keeps, is_alike=is_alike)
        assert {kind: each.name for kind, each in found.items()} == {"expert_down": form}


# `make test` multiplies by these forms in test_packed_formats.py.
@pytest.mark.long
@pytest.mark.takes(36)
def test_the_simulator_gives_the_references_tokens(tmp_path):
    """With all forms on GPUs of these types."""
    kinds = dict.fromkeys(KINDS[:3], "Q3_K") | {"attn_output": "IQ1_M", "ffn_down": "TQ1_0"}
    kinds |= dict.fromkeys(("ffn_gate", "ffn_up"), "IQ4_NL")
    write(tmp_path / "m.gguf", {f"blk.0.{kind}": each for kind, each in kinds.items()}, layers=1)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        read = read_for(checkpoint, "sim", None)
        forms = [read.formats[kind].name for kind in PRODUCTS]
        assert forms == ["int8_32", "nested6_256", "q8_0", "q4_0"]
        reference, asked = Reference(read), SamplingParams(max_tokens=2)
        tokens = [token for token, _ in reference.generate(IDS[:2], asked)]
        with Engine(checkpoint, "sim", blocks=1, context=16) as engine:
            assert engine.generate(IDS[:2], asked).ids == tokens
            found = engine.logits(IDS[:2])
        wanted = reference.logits(IDS[:2])
        np.testing.assert_allclose(found, wanted, atol=TOLERANCE * wanted.std())


@pytest.mark.parametrize("name", HALVES)
def test_a_damaged_factor_is_named(tmp_path, name):
    blocks = random_blocks((128, 256), name)
    one = blocks.reshape(-1, IN_FILES[name].words)[5:6]
    with_factors(name, one, np.array([np.nan]))
    path = tmp_path / "m.gguf"
    tensors = {"blk.0.attn_k.weight": (blocks, gguf.GGMLQuantizationType[name])}
    write_gguf(path, tensors=tensors, **SHAPE | {"head_dim": 64, "layers": 1})
    with open_checkpoint(path) as checkpoint:
        read = read_for(checkpoint, "host", None)
        told = "tensor blk.0.attn_k.weight has a weight that is NaN or infinite"
        with pytest.raises(kccl.Error, match=told):
            read.read("layers.0.wk")
