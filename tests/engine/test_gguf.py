"""GGUF files: what is read, each quantisation against its definition, and what is refused."""

import gguf
import ml_dtypes
import numpy as np
import pytest
from long import long_beyond_each
from tiny_models import random_tensors, write_gguf

import kccl
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.formats import ggml
from kccl.engine.model.rope import LinearScaling, Rope, TableScaling

BF16 = ml_dtypes.bfloat16
# Sizes that all quantisations divide.
WIDE = {"hidden": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 1}
WIDE |= {"vocab": 264}


def f16(raw, at):
    return float(raw[at : at + 2].view(np.float16)[0])


def q8_0(raw):
    return [f16(raw, 0) * int(q) for q in raw[2:].view(np.int8)]


def nibbles(raw):
    """Low halves of all bytes, then high halves."""
    return [int(byte) & 15 for byte in raw] + [int(byte) >> 4 for byte in raw]


def q4_0(raw):
    return [f16(raw, 0) * (q - 8) for q in nibbles(raw[2:])]


def q4_1(raw):
    return [f16(raw, 0) * q + f16(raw, 2) for q in nibbles(raw[4:])]


def fifths(raw):
    """Bits, the lowest of a byte first."""
    return [int(byte) >> bit & 1 for byte in raw for bit in range(8)]


def q5_0(raw):
    pairs = zip(nibbles(raw[6:]), fifths(raw[2:6]), strict=True)
    return [f16(raw, 0) * (q + 16 * top - 16) for q, top in pairs]


def q5_1(raw):
    pairs = zip(nibbles(raw[8:]), fifths(raw[4:8]), strict=True)
    return [f16(raw, 0) * (q + 16 * top) + f16(raw, 2) for q, top in pairs]


def q5_k(raw):
    """Those of Q4_K with a fifth bit: byte i has those of column i of each group."""
    return q4_k(np.concatenate([raw[:16], raw[48:]]), raw[16:48])


def q4_k(raw, tops=(0,) * 32):
    """256 values in 8 groups: 6-bit scales and minima, packed; 4-bit values."""
    d, dmin, packed, quants = f16(raw, 0), f16(raw, 2), raw[4:16].tolist(), raw[16:]
    values = []
    for group in range(8):
        if group < 4:
            scale, minimum = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            minimum = packed[group + 4] >> 4 | (packed[group] >> 6) << 4
        pair = nibbles(quants[32 * (group // 2) : 32 * (group // 2) + 32])
        each = pair[32:] if group % 2 else pair[:32]
        each = [q + 16 * (int(top) >> group & 1) for q, top in zip(each, tops, strict=True)]
        values += [d * scale * q - dmin * minimum for q in each]
    return values


def q6_k(raw):
    """256 values in 16 groups: 8-bit scales; 4 bits of a value in one place, 2 in another."""
    low, high, scales, d = raw[:128], raw[128:192], raw[192:208].view(np.int8), f16(raw, 208)
    values = []
    for at in range(256):
        half, quarter, column = at // 128, at % 128 // 32, at % 32
        byte = int(low[64 * half + 32 * (quarter % 2) + column])
        top = int(high[32 * half + column]) >> 2 * quarter & 3
        q = (byte >> 4 if quarter >= 2 else byte & 15) | top << 4
        values.append(d * int(scales[at // 16]) * (q - 32))
    return values


def mxfp4(raw):
    sizes = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    numbers = [sizes[code & 7] * (-1) ** (code >> 3) for code in nibbles(raw[1:])]
    return [number * 2.0 ** (int(raw[0]) - 127) for number in numbers]


# Name -> values a block, bytes a block, where FP16 scales lie, the definition.
BLOCKS = {
    "Q8_0": (32, 34, (0,), q8_0),
    "Q4_0": (32, 18, (0,), q4_0),
    "Q4_1": (32, 20, (0, 2), q4_1),
    "Q5_0": (32, 22, (0,), q5_0),
    "Q5_1": (32, 24, (0, 2), q5_1),
    "Q4_K": (256, 144, (0, 2), q4_k),
    "Q5_K": (256, 176, (0, 2), q5_k),
    "Q6_K": (256, 210, (208,), q6_k),
    "MXFP4": (32, 17, (), mxfp4),
}


def random_blocks(shape, name):
    """Random bytes with scales of a sensible size, and the values by the definition."""
    size, num_bytes, scales, define = BLOCKS[name]
    noise = np.random.default_rng(1)
    blocks = noise.integers(0, 256, (np.prod(shape) // size, num_bytes), np.uint8)
    for at in scales:
        each = noise.uniform(-0.1, 0.1, len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = each.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = noise.integers(118, 124, len(blocks))
    values = np.array([define(block) for block in blocks]).reshape(shape)
    return blocks.reshape(*shape[:-1], -1), values


@pytest.mark.parametrize(("name", "chunk"), long_beyond_each(BLOCKS, [1 << 20, 1024]))
def test_quantised_tensors(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr(ggml, "_CHUNK", chunk)
    code = gguf.GGMLQuantizationType[name]
    keys, wanted_keys = random_blocks((128, 256), name)
    table, wanted_table = random_blocks((264, 256), name)
    tensors = {"blk.0.attn_k.weight": (keys, code), "token_embd.weight": (table, code)}
    write_gguf(tmp_path / "m.gguf", tensors=tensors, **WIDE)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        read_keys = checkpoint.tensor("layers.0.wk").reshape(128, 256)
        read_rows = checkpoint.rows("embedding", 3, 11)
    for read, wanted in ((read_keys, wanted_keys), (read_rows, wanted_table[3:11])):
        assert read.dtype == BF16
        # Half a unit in the last place of BF16, and the rounding of FP32 where values cancel.
        read = read.astype(np.float64)
        np.testing.assert_allclose(read, wanted, rtol=2**-8, atol=2**-20 * np.abs(wanted).max())


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_plain_tensors(tmp_path, dtype):
    wanted = random_tensors({"x": (8, 16)}, dtype)["x"]
    raw = (wanted.view(np.uint8), gguf.GGMLQuantizationType.BF16) if dtype is BF16 else wanted
    write_gguf(tmp_path / "m.gguf", tensors={"blk.1.attn_v.weight": raw})
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        # The other tensors are F32.
        assert checkpoint.dtype == "bfloat16"
        read = checkpoint.tensor("layers.1.wv").reshape(8, 16)
        exact = checkpoint.as_dtype("float16").tensor("layers.1.wv").reshape(8, 16)
    assert read.dtype == BF16 and (read == wanted.astype(BF16)).all()
    assert exact.dtype == np.float16 and (exact == wanted.astype(np.float16)).all()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_every_tensor_arrives_under_its_name(tmp_path, family):
    written = write_gguf(tmp_path / "m.gguf", family=family)
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        config = checkpoint.config
        assert (config.family, config.num_layers, config.num_lanes) == (family, 2, 2)
        assert config.is_tied and config.vocab_size == 300
        assert config.has_qk_norm == (family == "qwen3")
        # Files of Llama have the rows of wq and wk permuted.
        assert config.rope == Rope(is_interleaved=family == "llama")
        assert {n: checkpoint.tensor(n).shape for n in checkpoint.names()} == config.shapes()
        assert config.biases == (("qkv",) if family == "qwen2" else ())
        for lane in range(2 if family == "qwen2" else 0):
            cut = written["blk.1.attn_k.bias"][4 * lane : 4 * lane + 4]
            assert (checkpoint.tensor("layers.1.bk")[lane] == cut).all()
        matrix = written["blk.1.attn_output.weight"].astype(BF16)
        for lane in range(2):
            cut = matrix[:, 8 * lane : 8 * lane + 8]
            assert (checkpoint.tensor("layers.1.wo")[lane] == cut).all()
        assert (checkpoint.tensor("layers.0.ffn_norm") == written["blk.0.ffn_norm.weight"]).all()


def test_biases_of_a_llama(tmp_path):
    """llama.cpp reads them wherever a file has them. They stay in FP32."""
    rows = {"attn_q": 16, "attn_k": 8, "attn_v": 8, "ffn_down": 16}
    biases = {f"blk.{layer}.{name}.bias": (n,) for layer in range(2) for name, n in rows.items()}
    written = write_gguf(tmp_path / "m.gguf", tensors=random_tensors(biases, np.float32))
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config.biases == ("qkv", "down")
        assert (checkpoint.tensor("layers.1.b2") == written["blk.1.ffn_down.bias"]).all()
        bias = checkpoint.tensor("layers.0.bq")
        assert bias.shape == (2, 8) and (bias.ravel() == written["blk.0.attn_q.bias"]).all()


def test_a_window_that_no_position_reaches_is_none(tmp_path):
    write_gguf(tmp_path / "m.gguf", change=lambda writer: writer.add_sliding_window(64))
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert checkpoint.config.window == 0


def test_an_untied_head(tmp_path):
    head = random_tensors({"x": (300, 16)}, np.float32)["x"]
    write_gguf(tmp_path / "m.gguf", tensors={"output.weight": head})
    with open_checkpoint(tmp_path / "m.gguf") as checkpoint:
        assert not checkpoint.config.is_tied
        assert (checkpoint.tensor("head") == head.astype(BF16)).all()


def test_rope_of_a_file(tmp_path):
    def change(writer):
        writer.add_rope_freq_base(5e5)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    write_gguf(tmp_path / "m.gguf", change=change)
    rope = open_checkpoint(tmp_path / "m.gguf").config.rope
    assert rope == Rope(theta=5e5, is_interleaved=True, scaling=LinearScaling(2.0))
    factors = {"rope_freqs.weight": np.array([1, 8], np.float32)}
    write_gguf(tmp_path / "n.gguf", tensors=factors)
    rope = open_checkpoint(tmp_path / "n.gguf").config.rope
    assert rope.scaling == TableScaling((1.0, 8.0))


def q8_k(shape):
    return np.zeros((shape[0], shape[1] // 256 * 292), np.uint8), gguf.GGMLQuantizationType.Q8_K


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        ({"family": "gemma"}, "general.architecture is 'gemma', must be one of llama, qwen2"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, r"tensor blk\.1\.ffn_up\.weight is missing$"),
        ({"tensors": {"token_embd.weight": None}}, r"tensor token_embd\.weight is missing$"),
        (
            {"tensors": {"blk.0.attn_q.bias": np.zeros(16, np.float32)}},
            r"tensor blk\.0\.attn_k\.bias is missing$",
        ),
        (
            {"tensors": {"blk.0.attn_norm.bias": np.zeros(16, np.float32)}},
            r"blk\.0\.attn_norm\.bias is not part of a llama model",
        ),
        (
            {"family": "qwen2", "tensors": {"blk.1.attn_v.bias": None}},
            r"tensor blk\.1\.attn_v\.bias is missing$",
        ),
        (
            {"change": lambda writer: writer.add_sliding_window(32)},
            r"llama\.attention\.sliding_window is 32, must be absent or at least the context, 64",
        ),
        (
            {"tensors": {"blk.0.attn_q.weight": np.zeros((16, 8), np.float32)}},
            r"attn_q\.weight has shape \[16, 8\], must have \[16, 16\]",
        ),
        (
            {"tensors": {"blk.0.attn_k.weight": q8_k((128, 256))}, **WIDE},
            "blk.0.attn_k.weight has quantisation Q8_K, must be one of F32, F16, BF16, Q8_0",
        ),
        (
            {"tensors": {"rope_freqs.weight": np.ones(3, np.float32)}},
            r"tensor rope_freqs\.weight has shape \[3\], must have \[2\] by the model's",
        ),
        (
            {"tensors": {"rope_freqs.weight": np.array([1, np.nan], np.float32)}},
            r"tensor rope_freqs\.weight: a factor of the RoPE scaling is nan, must be a number",
        ),
        (
            {"change": lambda writer: writer.add_string("llama.rope.scaling.type", "ntk")},
            "rope.scaling.type is 'ntk', must be one of none, linear, yarn, longrope",
        ),
        ({"change": lambda w: w.add_expert_count(8)}, "llama.expert_count is 8, must be absent"),
        ({"change": lambda w: w.add_rope_dimension_count(2)}, "rope.dimension_count is 2, must be"),
        (
            {"heads": 3, "kv_heads": 2, "head_dim": 6},
            r"attention\.head_count is 3, must be divisible by llama\.attention\.head_count_kv",
        ),
        (
            {"change": lambda writer: writer.add_block_count(5000)},
            "llama.block_count is 5000, must",
        ),
        (
            {"change": lambda writer: writer.add_feed_forward_length([0, 0])},
            r"field llama\.feed_forward_length is .*0.* must be at least 1",
        ),
        (
            {"change": lambda writer: writer.add_rope_freq_base(0.0)},
            r"field llama\.rope\.freq_base is 0\.0, must be a number above 0",
        ),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, kept, told):
    file = tmp_path / "m.gguf"
    write_gguf(file, **kept)
    with pytest.raises(kccl.Error, match=told) as caught:
        open_checkpoint(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_weights_that_are_not_finite_are_refused_when_read(tmp_path):
    blocks, _ = random_blocks((128, 256), "Q8_0")
    blocks[5, :2] = np.array([np.nan], np.float16).view(np.uint8)
    tensors = {"blk.0.attn_k.weight": (blocks, gguf.GGMLQuantizationType.Q8_0)}
    write_gguf(tmp_path / "m.gguf", tensors=tensors, **WIDE)
    with (
        open_checkpoint(tmp_path / "m.gguf") as checkpoint,
        pytest.raises(kccl.Error, match=r"tensor blk\.0\.attn_k\.weight has a weight that is NaN"),
    ):
        checkpoint.tensor("layers.0.wk")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is no GGUF file"),
        (b"GGUF", "is truncated or damaged: the version needs 4 bytes at offset 4"),
        (b"GGML" + bytes(60), "is no GGUF file$"),
        (b"GGUF\0\0\0\3" + bytes(60), "has version 50331648 of GGUF: it is big-endian; convert it"),
        (b"GGUF\5\0\0\0" + bytes(60), "has version 5 of GGUF, must have one of"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is no GGUF file: it is a Git LFS point"),
        (b"<html>", "is no GGUF file: it is an HTML page"),
        (b"tjgg" + bytes(60), "is no GGUF file: it is a GGML file, older than GGUF"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "18446744073709551615 metadata values needs"),
        (b"GGUF\3\0\0\0" + b"\xff" * 8 + bytes(8), "18446744073709551615 tensors needs"),
    ],
)
def test_other_files_are_named(tmp_path, content, told):
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(kccl.Error, match=told):
        open_checkpoint(tmp_path / "m.gguf")


def test_a_file_that_shrinks_is_noticed(tmp_path):
    file = tmp_path / "m.gguf"
    write_gguf(file)
    with open_checkpoint(file) as checkpoint:
        with open(file, "r+b") as shrunk:
            shrunk.truncate(file.stat().st_size // 2)
        with pytest.raises(kccl.Error, match="was cut off since it opened"):
            for name in checkpoint.names():
                checkpoint.tensor(name)
