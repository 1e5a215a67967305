"""Weights of 16 bits that an engine rounds to fewer while it reads them."""

import re

import numpy as np
import pytest
from long import long_after
from safetensors.numpy import save_file
from test_quantize import MODELS, write_model

import kccl
from kccl.engine import Engine
from kccl.engine.diff import Diff
from kccl.engine.executors.opening import read_for, rounding
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.models import BUNDLED
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.formats.table import ROUNDED
from kccl.tools.cli import main

IDS = np.random.default_rng(1).integers(48, size=21).tolist()
# Lanes have 128 columns of the matrices before the activation and 64 of the attention's output.
SHAPE = {"hidden": 128, "ffn": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
SHAPE |= {"num_layers": 2, "num_lanes": 2}


def checkpoint_of(model="tiny-llama", **more):
    return random_checkpoint(model, **(SHAPE | more))


@pytest.mark.parametrize("weights", sorted(ROUNDED.keys() - {"mxfp4"}))
def test_each_weight_is_the_nearest_in_its_group(weights):
    """tests/engine/test_mxfp4.py has the rounding of MXFP4."""
    checkpoint = checkpoint_of()
    rounded = checkpoint.as_weights(weights)
    narrow = 64 if weights == "int4" else 32
    for name, group in (("layers.1.w1", 128), ("layers.0.wo", narrow)):
        exact = checkpoint.tensor(name).astype(np.float32)
        found = rounded.read(name)
        assert found.format.block == group
        exact = exact.reshape(-1, group)
        error = np.abs(found.to_float32().reshape(-1, group) - exact)
        largest = np.abs(exact).max(axis=1, keepdims=True)
        steps = {"int8": 127, "int4": 7}
        if weights == "fp8":
            # Three bits of mantissa behind the first one; below 2 ** -6 numbers are even.
            bound = np.maximum(np.abs(exact) / 16, largest / 448 * 2.0**-10)
        else:
            bound = largest / steps[weights] / 2
        assert (error <= bound * 1.0001).all()
        # Most weights are no numbers of the format.
        assert (error > 0).mean() > 0.5
    table = checkpoint.tensor("embedding")
    np.testing.assert_array_equal(rounded.tensor("embedding"), table)


@pytest.mark.parametrize(
    ("weights", "model"),
    long_after(4, [*((each, "tiny-llama") for each in ROUNDED), ("int4", "tiny-laneformer")]),
)
def test_every_op_is_the_references(weights, model):
    checkpoint, found = checkpoint_of(model, num_layers=4), []
    for ranks, blocks in ((1, 1), (2, 2)):
        with Engine(checkpoint, ranks=ranks, blocks=blocks, weights=weights) as engine:
            found.append(engine.logits(IDS))
            assert engine.notices == (f"the matrices of layers are rounded from BF16 to {weights}",)
            if ranks == 2:
                rounded = checkpoint.as_weights(weights)
                assert all(each.is_within(None) for each in Diff(rounded, engine, IDS).all())
    np.testing.assert_array_equal(found[0].view(np.uint32), found[1].view(np.uint32))
    with Engine(checkpoint) as engine:
        exact = engine.logits(IDS)
    error = np.sqrt(np.square(found[0] - exact).mean() / np.square(exact).mean())
    assert 0 < error < {"fp8": 0.2, "int8": 0.06, "int4": 0.8, "mxfp4": 0.8}[weights]


def test_a_matrix_without_whole_groups_stays_and_is_named():
    checkpoint = checkpoint_of(ffn=200)
    with Engine(checkpoint, weights="int8") as engine:
        first, second = engine.notices
        formats = {op: each.name for op, each in engine.formats.items()}
    assert first == "the matrices of layers are rounded from BF16 to int8"
    assert re.fullmatch(
        r"2 of them stay in bfloat16: a lane's 100 columns are no whole groups of 32, as in .+",
        second,
    )
    assert (formats["gate_up"], formats["down"]) == ("int8_128", "bfloat16")


def test_what_cannot_be_rounded_is_refused(tmp_path):
    checkpoint = checkpoint_of()
    with pytest.raises(kccl.InvalidArgument, match=r"backend 'hip': .* have int4_128, int4_64$"):
        read_for(checkpoint, "hip", None, "int4")
    for wrong in ("int2", "", 8, ["int8"]):
        with pytest.raises(kccl.InvalidArgument, match="must be one of 'fp8', 'int8', 'int4'"):
            read_for(checkpoint, "host", None, wrong)
    packed = checkpoint_of(stored={"w1": "q8_0"})
    with pytest.raises(kccl.InvalidArgument, match="has weights in Q8_0 already"):
        read_for(packed, "host", None, "int8")
    odd = random_checkpoint("tiny-llama", hidden=40, ffn=56, num_lanes=1, head_dim=20)
    with pytest.raises(kccl.InvalidArgument, match="no matrix whose lanes have whole groups of 32"):
        read_for(odd, "host", None, "int4")


def test_a_checkpoint_that_was_rounded_can_be_read_otherwise():
    rounded = checkpoint_of().as_weights("int8")
    for other in (rounded.as_dtype("bfloat16"), rounded.as_stored()):
        assert {each.name for each in other.formats.values()} == {"bfloat16"}
    assert rounded.as_dtype("bfloat16").weights == ""
    assert rounding(rounded.as_dtype("bfloat16")) == rounding(rounded.as_stored()) == []
    with Engine(rounded) as engine:
        assert "int8_128" in {each.name for each in engine.formats.values()}


@pytest.mark.parametrize("weights", sorted(ROUNDED))
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_weight_that_is_no_number_is_named(weights, wrong, tmp_path):
    folder, tensors = write_model(tmp_path / "m", MODELS["llama"])
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = wrong
    save_file(tensors, folder / "model.safetensors")
    with open_checkpoint(folder) as checkpoint, pytest.raises(kccl.Error, match=name):
        Engine(checkpoint, weights=weights)


def test_the_bundled_model_still_writes_python():
    with open_checkpoint(BUNDLED) as checkpoint, Engine(checkpoint, weights="int8") as engine:
        small = engine.nbytes
        text = engine.generate("def add(a, b):\n    return a", temperature=0, max_tokens=8).text
    with Engine(BUNDLED) as engine:
        assert small < 0.7 * engine.nbytes
        same = engine.generate("def add(a, b):\n    return a", temperature=0, max_tokens=8).text
    assert text == same


def test_the_command_has_the_option(capsys):
    words = ("--weights", "int4", "--prompt", "def f(", "--max-tokens", "3", "-n", "2")
    assert main(["generate", *words]) == 0
    told = capsys.readouterr()
    assert told.out and "the matrices of layers are rounded from BF16 to int4" in told.err
    assert main(["generate", *words, "--backend", "hip"]) == 2
    assert "must give the layers' matrices one format" in capsys.readouterr().err
