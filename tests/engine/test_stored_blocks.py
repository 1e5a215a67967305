"""Formats of blocks of integers, which the host executor multiplies as they are stored."""

from itertools import cycle

import gguf
import numpy as np
import pytest
from long import long_after
from test_gguf import BLOCKS, WIDE, random_blocks
from tiny_models import write_gguf

import kccl
from kccl.engine import Engine
from kccl.engine.diff import Diff
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint, open_checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.formats.ggml import Ggml
from kccl.engine.formats.table import IN_FILES, ON_HOST

# Formats of GGUF. Folders have others: test_quantized_folders.py.
GGML = [name for name, each in ON_HOST.items() if isinstance(each, Ggml)]
MATRICES = ("wq", "wk", "wv", "wo", "w1", "w3", "w2", "embedding", "head")
# All lanes have whole blocks: 32 columns of "wo" and of "w2" each.
SHAPES = {
    "tiny-llama": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "ffn": 128, "num_lanes": 4},
    "tiny-laneformer": {"ffn": 128, "head_dim": 16, "num_heads": 8, "num_kv_heads": 4},
    "tiny-qwen2": {"num_heads": 8, "num_kv_heads": 4, "head_dim": 16, "ffn": 192, "num_lanes": 2},
}
# Such shapes for blocks of 256 columns.
WIDE_SHAPES = {
    "tiny-llama": {"num_heads": 8, "num_kv_heads": 4, "ffn": 1024, "num_lanes": 4},
    "tiny-laneformer": {"num_heads": 4, "num_kv_heads": 2, "ffn": 512, "num_lanes": 2},
    "tiny-qwen2": {"num_heads": 4, "num_kv_heads": 2, "ffn": 512, "num_lanes": 2},
}
for each in WIDE_SHAPES.values():
    each |= {"hidden": 256, "head_dim": 128, "num_layers": 2}
WIDE_SHAPES["tiny-laneformer"]["window_layers"] = 1
# Formats that are close to one that is tested more.
REST = ("q8_0", "q5_0", "q5_1", "q5_k")
FILES = ["Q4_K", "MXFP4", "Q4_0", "Q6_K", *map(str.upper, REST)]
# More ids than one pass takes, and than a group of columns.
IDS = np.random.default_rng(1).integers(256, size=45).tolist()


def stored_in(name, shape="tiny-llama", **changes):
    sizes = SHAPES if ON_HOST[name].block == 32 else WIDE_SHAPES
    stored = dict.fromkeys(MATRICES, name)
    return random_checkpoint(shape, stored=stored, **sizes[shape] | changes)


@pytest.mark.parametrize(("name", "shape"), list(zip(GGML, cycle(SHAPES))))
def test_every_op_is_the_references(name, shape):
    checkpoint = stored_in(name, shape)
    with Engine(checkpoint, ranks=2, blocks=2) as engine:
        assert {each.name for each in engine.formats.values()} == {name}
        assert engine.notices == ()
        differences = list(Diff(checkpoint, engine, IDS).all())
    assert len(differences) > 10
    assert all(each.is_within(None) for each in differences)
    # The reference has the numbers of the file: with BF16's it would be another model.
    kept = checkpoint.as_stored(ON_HOST)
    exact, rounded = (Reference(each).logits(IDS[:3]) for each in (kept, checkpoint))
    with Engine(checkpoint) as engine:
        found = engine.logits(IDS[:3])
    if name == "mxfp4":
        # BF16 has all its numbers.
        np.testing.assert_array_equal(exact, rounded)
    else:
        assert np.abs(found - rounded).max() > 5 * np.abs(found - exact).max()


@pytest.mark.parametrize("name", long_after(2, ["q4_1", "q4_k", "q6_k", "mxfp4", *REST]))
def test_the_bits_are_the_same_for_any_ranks_threads_and_columns(name):
    checkpoint = stored_in(name)
    found = []
    for ranks, blocks in ((1, 1), (1, 3), (2, 2), (4, 1)):
        with Engine(checkpoint, ranks=ranks, blocks=blocks) as engine:
            logits = engine.logits(IDS)
            found += [logits, engine.logits(IDS[:2])]
    for several, two in zip(found[::2], found[1::2], strict=True):
        np.testing.assert_array_equal(several.view(np.uint32), found[0].view(np.uint32))
        np.testing.assert_array_equal(two, several[:2])


def test_a_large_activation_is_no_error(monkeypatch):
    """A norm's weight of 1e6, and numbers near 1 in the same group."""
    checkpoint, read = stored_in("q8_0"), Checkpoint._read

    def spoilt(self, name, start, stop):
        words = read(self, name, start, stop)
        if name == "layers.1.ffn_norm":
            words = words.copy()
            words.view(np.float32)[7] = 1e6
        return words

    monkeypatch.setattr(Checkpoint, "_read", spoilt)
    with Engine(checkpoint) as engine:
        differences = list(Diff(checkpoint, engine, IDS[:5]).all())
    assert all(each.is_within(None) for each in differences)
    assert max(each.rms for each in differences) > 1e4


@pytest.mark.parametrize("name", long_after(2, FILES))
def test_a_file_is_multiplied_as_it_is_stored(tmp_path, name):
    """The packed weights take the file's bytes, and the embedding's rows beside the head."""
    code = gguf.GGMLQuantizationType[name]
    shapes = {"attn_q": (512, 256), "attn_k": (256, 256), "attn_v": (256, 256)}
    shapes |= {"attn_output": (256, 512), "ffn_gate": (512, 256), "ffn_up": (512, 256)}
    shapes |= {"ffn_down": (256, 512)}
    made = {f"blk.0.{each}.weight": random_blocks(shape, name) for each, shape in shapes.items()}
    made |= {f"{each}.weight": random_blocks((264, 256), name) for each in ("token_embd", "output")}
    tensors = {each: (blocks, code) for each, (blocks, _) in made.items()}
    path = tmp_path / "m.gguf"
    write_gguf(path, tensors=tensors, **WIDE | {"ffn": 512, "head_dim": 128})
    with open_checkpoint(path) as checkpoint, Engine(checkpoint, ranks=2) as engine:
        assert {each.in_files for each in engine.formats.values()} == {name}
        assert engine.notices == () and engine.dtype == "bfloat16"
        assert engine.nbytes <= 1.05 * sum(blocks.nbytes for blocks, _ in made.values())
        differences = list(Diff(checkpoint, engine, IDS[:6]).all())
        kept = checkpoint.as_stored(ON_HOST)
        read = kept.read("layers.0.w2").to_float32().transpose(1, 0, 2).reshape(256, 512)
    assert all(each.is_within(None) for each in differences)
    np.testing.assert_allclose(read, made["blk.0.ffn_down.weight"][1], rtol=1e-6, atol=1e-6)
    # Where a dtype is asked for, weights become that.
    with Engine(path, dtype="bfloat16", tokenizer=False) as engine:
        assert engine.notices == (f"weights are rounded from {name} to bfloat16",)


def test_layers_may_have_different_formats(tmp_path):
    """And a product of several formats has none of them."""
    tensors = {}
    for name, quantisation in {
        "blk.0.ffn_down": "Q4_1",
        "blk.1.ffn_down": "Q8_0",
        "blk.1.attn_output": "Q4_0",
        "blk.0.ffn_gate": "Q8_0",
        "blk.0.ffn_up": "Q4_0",
    }.items():
        blocks, _ = random_blocks((256, 256), quantisation)
        tensors[f"{name}.weight"] = blocks, gguf.GGMLQuantizationType[quantisation]
    path = tmp_path / "m.gguf"
    write_gguf(path, tensors=tensors, **WIDE | {"layers": 2})
    with open_checkpoint(path) as checkpoint:
        logits = []
        for ranks in (1, 2):
            with Engine(checkpoint, ranks=ranks) as engine:
                logits.append(engine.logits(IDS[:9]))
                differences = list(Diff(checkpoint, engine, IDS[:9]).all())
                formats = {op: each.name for op, each in engine.formats.items()}
        alike = checkpoint.as_stored(is_alike=True)
        assert alike.formats == checkpoint.formats
        told = "takes 16 bits a weight:"
        assert set(alike.expanded) == {
            f"Q8_0 {told} layers have several formats, as in blk.1.ffn_down.weight",
            f"Q4_0 {told} layers have several formats, as in blk.1.attn_output.weight",
            f"Q4_1 {told} layers have several formats, as in blk.0.ffn_down.weight",
            f"Q8_0 {told} a product has matrices of several formats, as in blk.0.ffn_gate.weight",
            f"Q4_0 {told} a product has matrices of several formats, as in blk.0.ffn_up.weight",
        }
    usual = dict.fromkeys(("embed", "qkv", "out", "gate_up", "down", "head"), "bfloat16")
    own = {"layers.0.down": "q4_1", "layers.1.down": "q8_0", "layers.1.out": "q4_0"}
    assert formats == usual | own
    assert all(each.is_within(None) for each in differences)
    np.testing.assert_array_equal(logits[0], logits[1])


def write_mixed(path, kinds):
    """Writes a layer with some matrices in other formats."""
    rows = {"attn_q": 256, "attn_k": 128, "attn_v": 128}
    tensors = {}
    for name, each in kinds:
        blocks, _ = random_blocks((rows[name], 256), each)
        tensors[f"blk.0.{name}.weight"] = blocks, gguf.GGMLQuantizationType[each]
    write_gguf(path, tensors=tensors, **WIDE)


@pytest.mark.parametrize("of_attention", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "BF16", "Q8_0")])
def test_queries_keys_and_values_may_have_different_formats(tmp_path, of_attention):
    """A file of Q4_K_M mixes Q4_K and Q6_K; rows of another length become Q5_0 and Q8_0."""
    path, names = tmp_path / "m.gguf", ("attn_q", "attn_k", "attn_v")
    kinds = zip(names, of_attention, strict=True)
    write_mixed(path, [each for each in kinds if each[1] != "BF16"])
    found = []
    with open_checkpoint(path) as checkpoint:
        for ranks, blocks in ((1, 1), (1, 3), (2, 1)):
            with Engine(checkpoint, ranks=ranks, blocks=blocks) as engine:
                found.append(engine.logits(IDS[:9]))
                formats = engine.formats
                differences = list(Diff(checkpoint, engine, IDS[:9]).all())
                assert all(each.is_within(None) for each in differences)
    own = [formats.get(f"layers.0.{name}", formats["qkv"]) for name in ("wq", "wk", "wv")]
    assert tuple(each.in_files for each in own) == of_attention
    for each in found[1:]:
        np.testing.assert_array_equal(each.view(np.uint32), found[0].view(np.uint32))


def test_matrices_that_share_a_panel_have_one_format():
    """A lane's queries have 8 rows here."""
    shape = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "num_lanes": 2}
    checkpoint = random_checkpoint("tiny-llama", stored={"wq": "q8_0", "wk": "q5_0"}, **shape)
    with Engine(checkpoint) as engine:
        assert {each.name for each in engine.formats.values()} == {"bfloat16"}
        told = "Q8_0 takes 16 bits a weight: a product has matrices of several formats, as in "
        assert engine.notices[1] == f"{told}layers.0.wq"
        assert all(each.is_within(None) for each in Diff(checkpoint, engine, IDS[:3]).all())


def test_a_lane_without_whole_blocks_is_rounded(tmp_path):
    """A row of 96 values has three blocks, and two lanes."""
    code = gguf.GGMLQuantizationType.Q8_0
    tensors = {
        "blk.0.ffn_down.weight": (random_blocks((256, 96), "Q8_0")[0], code),
        "blk.0.attn_output.weight": (random_blocks((256, 256), "Q8_0")[0], code),
    }
    path = tmp_path / "m.gguf"
    write_gguf(path, tensors=tensors, **WIDE | {"ffn": 96})
    with open_checkpoint(path) as checkpoint, Engine(checkpoint) as engine:
        formats = {kind: each.name for kind, each in engine.formats.items()}
        assert (formats["down"], formats["out"]) == ("bfloat16", "q8_0")
        assert engine.notices == (
            "weights are rounded from F32, Q8_0 to bfloat16",
            "Q8_0 takes 16 bits a weight: a lane's 48 columns are no whole blocks of 32, as in "
            "blk.0.ffn_down.weight",
        )
        assert all(each.is_within(None) for each in Diff(checkpoint, engine, IDS[:5]).all())


@pytest.mark.parametrize("name", long_after(1, ["Q4_K", "Q5_K", "Q6_K"]))
def test_lanes_may_end_within_a_block_of_256(tmp_path, name):
    """A lane has 128 columns of "wo", and 384 of "w2"."""
    code, path = gguf.GGMLQuantizationType[name], tmp_path / "m.gguf"
    out, down = random_blocks((256, 256), name), random_blocks((256, 768), name)
    made = {"blk.0.attn_output.weight": out, "blk.0.ffn_down.weight": down}
    tensors = {each: (blocks, code) for each, (blocks, _) in made.items()}
    write_gguf(path, tensors=tensors, **WIDE | {"ffn": 768})
    logits = []
    with open_checkpoint(path) as checkpoint:
        for ranks in (1, 2):
            with Engine(checkpoint, ranks=ranks, blocks=1) as engine:
                formats = engine.formats
                assert {formats[op].name for op in ("out", "down")} == {f"{name.lower()}_64"}
                assert engine.notices == ("weights are rounded from F32 to bfloat16",)
                logits.append(engine.logits(IDS[:6]))
                differences = list(Diff(checkpoint, engine, IDS[:6]).all())
        assert all(each.is_within(None) for each in differences)
        # They are the file's numbers, cut and not rounded.
        kept = checkpoint.as_stored(ON_HOST).read("layers.0.w2")
    assert kept.shape == (2, 256, 384)
    read = kept.to_float32().transpose(1, 0, 2).reshape(256, 768)
    np.testing.assert_array_equal(read, IN_FILES[name].to_float32(down[0]))
    np.testing.assert_array_equal(logits[0], logits[1])


def test_lanes_without_whole_quarters_are_rounded(tmp_path):
    blocks, _ = random_blocks((256, 256), "Q6_K")
    path = tmp_path / "m.gguf"
    tensors = {"blk.0.ffn_down.weight": (blocks, gguf.GGMLQuantizationType.Q6_K)}
    write_gguf(path, tensors=tensors, **WIDE | {"heads": 8, "kv_heads": 8, "head_dim": 32})
    with Engine(path, tokenizer=False) as engine:
        assert engine.notices[1] == (
            "Q6_K takes 16 bits a weight: a lane's 32 columns are no whole blocks of 64, as in "
            "blk.0.ffn_down.weight"
        )


def test_a_damaged_factor_of_quarters_is_named(tmp_path):
    blocks, _ = random_blocks((256, 768), "Q4_K")
    blocks[7, 2:4] = np.array([np.inf], np.float16).view(np.uint8)
    tensors = {"blk.0.ffn_down.weight": (blocks, gguf.GGMLQuantizationType.Q4_K)}
    write_gguf(tmp_path / "m.gguf", tensors=tensors, **WIDE | {"ffn": 768})
    told = "tensor blk.0.ffn_down.weight has a weight that is NaN or infinite"
    with pytest.raises(kccl.Error, match=told):
        Engine(tmp_path / "m.gguf", tokenizer=False)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("name", [name for name, each in BLOCKS.items() if each[2]])
def test_a_damaged_scale_is_named(tmp_path, name, wrong):
    blocks, _ = random_blocks((128, 256), name)
    for at in BLOCKS[name][2]:
        spoilt = blocks.copy()
        one = spoilt.reshape(-1, IN_FILES[name].words)[5]
        one[at : at + 2] = np.array([wrong], np.float16).view(np.uint8)
        code = gguf.GGMLQuantizationType[name]
        path = tmp_path / "m.gguf"
        write_gguf(path, tensors={"blk.0.attn_k.weight": (spoilt, code)}, **WIDE)
        told = "tensor blk.0.attn_k.weight has a weight that is NaN or infinite"
        with pytest.raises(kccl.Error, match=told):
            Engine(path, tokenizer=False)


@pytest.mark.parametrize("wrong", [255, 254])
def test_a_scale_of_mxfp4_that_is_nan_or_too_large_is_named(tmp_path, wrong):
    code, path = gguf.GGMLQuantizationType.MXFP4, tmp_path / "m.gguf"
    blocks, _ = random_blocks((128, 256), "MXFP4")
    blocks[7, 17 * 3] = wrong
    write_gguf(path, tensors={"blk.0.attn_k.weight": (blocks, code)}, **WIDE)
    told = "tensor blk.0.attn_k.weight has a weight that is NaN or infinite"
    with pytest.raises(kccl.Error, match=told):
        Engine(path, tokenizer=False)
