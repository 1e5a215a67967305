"""GGUF files as people have them: in parts, with odd metadata, and files that are no model."""

import struct

import gguf
import numpy as np
import pytest
from tiny_models import write_gguf

import kccl
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.gguf_file import GgufFile


@pytest.fixture
def parts(tmp_path):
    """A model in three files, and in one."""
    write_gguf(tmp_path / "one.gguf")
    write_gguf(tmp_path / "m.gguf", split=7)
    found = sorted(tmp_path.glob("m-*.gguf"))
    assert [each.name for each in found] == [f"m-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    return found


def contents(path):
    with open_checkpoint(path) as checkpoint:
        ids = checkpoint.tokenizer().encode("hello")
        return ids, {name: checkpoint.tensor(name) for name in checkpoint.names()}


@pytest.mark.parametrize("given", range(3))
def test_any_part_opens_the_model(parts, given):
    ids, tensors = contents(parts[given])
    wanted_ids, wanted = contents(parts[0].with_name("one.gguf"))
    assert ids == wanted_ids and tensors.keys() == wanted.keys()
    assert all((tensors[name] == wanted[name]).all() for name in wanted)


def test_a_part_that_is_missing_is_named(parts):
    parts[1].unlink()
    for given, number in ((0, 1), (2, 3)):
        told = rf"is part {number} of 3, and m-00002-of-00003\.gguf is missing beside it"
        with pytest.raises(kccl.Error, match=told):
            open_checkpoint(parts[given])
    parts[2].unlink()
    with pytest.raises(kccl.Error, match=r"m-00002-of-00003\.gguf and 1 more is missing"):
        open_checkpoint(parts[0])


def test_a_part_under_another_name_is_named(parts, tmp_path):
    other = parts[1].rename(tmp_path / "second.gguf")
    with pytest.raises(kccl.Error, match=r"second\.gguf is part 2 of 3, must have a name that end"):
        open_checkpoint(other)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(kccl.Error, match=r"m-00002.* is part 3 of 3, must be part 2 of 3 by its"):
        open_checkpoint(parts[0])


def test_a_weight_that_is_wrong_is_told_with_its_part(parts):
    name = list(GgufFile(parts[2]).tensors)[-1]
    content = bytearray(parts[2].read_bytes())
    content[-4:] = struct.pack("<f", np.nan)
    parts[2].write_bytes(content)
    with (
        pytest.raises(kccl.Error, match=rf"m-00003-of-00003\.gguf: tensor {name} has a weight"),
        open_checkpoint(parts[0]) as checkpoint,
    ):
        for each in checkpoint.names():
            checkpoint.tensor(each)


# ---- Metadata that nobody asks for --------------------------------------------------------------


def string(text):
    text = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(text)) + text


def array(kind, *values):
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


ODD = {
    "empty": array(4),
    "empty strings": array(8),
    "empty of no type": array(99),
    "nested": array(9, array(4, bytes(4)), array(8, string("x")), array(9)),
    "booleans": array(7, b"\0", b"\2"),
    "doubles": array(12, bytes(8)),
    "no UTF-8": array(8, string(b"caf\xe9")),
}


def with_value(path, value):
    """Puts one more value, an array, in front of a file's metadata."""
    content = path.read_bytes()
    tensors, values = struct.unpack("<QQ", content[8:24])
    added = string("people.odd") + struct.pack("<I", 9) + value
    # What follows stays aligned.
    pad = -(len(added) + 8 + 3 + 4) % 32
    added += string("pad") + struct.pack("<I", 8) + string(bytes(pad + 24))
    assert len(added) % 32 == 0
    path.write_bytes(content[:8] + struct.pack("<QQ", tensors, values + 2) + added + content[24:])


@pytest.mark.parametrize("name", ODD)
def test_an_odd_value_does_not_matter(tmp_path, name):
    write_gguf(tmp_path / "m.gguf")
    wanted = contents(tmp_path / "m.gguf")[1]
    with_value(tmp_path / "m.gguf", ODD[name])
    assert "people.odd" in GgufFile(tmp_path / "m.gguf").metadata
    found = contents(tmp_path / "m.gguf")[1]
    assert all((found[name] == wanted[name]).all() for name in wanted)


def test_an_array_whose_end_is_unknown_is_named(tmp_path):
    write_gguf(tmp_path / "m.gguf")
    with_value(tmp_path / "m.gguf", array(99, bytes(4)))
    with pytest.raises(kccl.Error, match=r"key people\.odd is an array of type 99, which GGUF"):
        open_checkpoint(tmp_path / "m.gguf")


def test_arrays_that_nest_without_end_are_refused(tmp_path):
    value = array(4)
    for _ in range(20):
        value = array(9, value)
    write_gguf(tmp_path / "m.gguf")
    with_value(tmp_path / "m.gguf", value)
    with pytest.raises(kccl.Error, match=r"key people\.odd is an array of type 9, .* too deep"):
        open_checkpoint(tmp_path / "m.gguf")


# ---- Other files --------------------------------------------------------------------------------


def test_a_big_endian_file_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(kccl.Error, match=r"it is big-endian; convert it with `gguf-convert-endian"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda w: w.add_type("adapter"), "general.type is 'adapter', must be .* a LoRA adapter"),
        (lambda w: w.add_type("mmproj"), "general.type is 'mmproj', must be .* projector"),
        (lambda w: w.add_logit_scale(0.5), "llama.logit_scale is 0.5, must be absent or 0 or 1"),
        (lambda w: w.add_final_logit_softcapping(30.0), "final_logit_softcapping is 30.0, must"),
        (lambda w: w.add_causal_attention(False), "llama.attention.causal is False, must be"),
        (lambda w: w.add_clamp_kqv(8.0), "llama.attention.clamp_kqv is 8.0, must be absent or 0"),
        (lambda w: w.add_expert_used_count(2), "llama.expert_used_count is 2, must be absent or"),
    ],
)
def test_keys_that_would_change_the_logits(tmp_path, change, told):
    write_gguf(tmp_path / "m.gguf", change=change)
    with pytest.raises(kccl.Error, match=told):
        open_checkpoint(tmp_path / "m.gguf")


def test_values_that_change_nothing(tmp_path):
    def change(writer):
        writer.add_type("model")
        writer.add_logit_scale(1.0)
        writer.add_causal_attention(True)
        writer.add_expert_count(0)

    write_gguf(tmp_path / "m.gguf", change=change)
    open_checkpoint(tmp_path / "m.gguf").close()
