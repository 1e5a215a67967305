"""`kccl quantize`: folders of 8 and 4 bits a weight from those of 16."""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors
from quantized_folders import LINEAR
from safetensors.numpy import save_file
from tiny_models import LLAMA, QWEN3, ordinary_shapes, write_folder

import kccl
from kccl.engine import Engine
from kccl.engine.commands.quantize import perplexity
from kccl.engine.diff import Diff
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.models import BUNDLED
from kccl.engine.files.quantize import KINDS, write_quantized
from kccl.engine.formats.mxfp4 import MXFP4
from kccl.engine.formats.table import ON_HOST
from kccl.tools.cli import main

IDS = np.random.default_rng(1).integers(300, size=17).tolist()
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
DTYPES = {
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}
MODELS = {"llama": LLAMA | SHAPE, "qwen3": QWEN3 | SHAPE}


def write_model(folder, config, dtype=ml_dtypes.bfloat16):
    """A folder of 16 or 32 bits with a tokenizer; returns it and its tensors."""
    noise, tensors = np.random.default_rng(0), {}
    for name, shape in ordinary_shapes(config).items():
        size = 1.0 if len(shape) == 1 else noise.standard_normal(shape) / np.sqrt(shape[-1])
        tensors[name] = np.broadcast_to(size, shape).astype(dtype)
    write_folder(folder, config, tensors, with_tokenizer=True)
    return folder, tensors


def meant(folder):
    """What the new files mean, read by themselves: numbers, scales and columns of a group."""
    held = {}
    for file in sorted(folder.glob("*.safetensors")):
        # It gives bytes, and NumPy has no FP8.
        for name, each in safetensors.deserialize(file.read_bytes()):
            array = np.frombuffer(each["data"], DTYPES[each["dtype"]])
            held[name] = array.reshape(each["shape"])
    found = {}
    for name, scales in held.items():
        if not name.endswith("_scale"):
            continue
        layer = name.removesuffix(".weight_scale")
        if f"{layer}.weight_packed" in held:
            words = held[f"{layer}.weight_packed"]
            rows, columns = held[f"{layer}.weight_shape"]
            bits = 32 * words.shape[1] // columns
            words = words.view(np.uint32)[:, :, None]
            numbers = words >> np.arange(0, 32, bits, dtype=np.uint32) & np.uint32(2**bits - 1)
            numbers = numbers.reshape(rows, columns).astype(np.float64) - 2 ** (bits - 1)
        else:
            numbers = held[f"{layer}.weight"].astype(np.float64)
            columns = numbers.shape[1]
        group = columns // scales.shape[1]
        found[layer] = numbers, np.repeat(scales.astype(np.float64), group, axis=1), group
    return found, held


@pytest.mark.parametrize("weights", sorted(KINDS.keys() - {"mxfp4"}))
@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_folder_holds_the_nearest_numbers_and_is_run(tmp_path, model, weights):
    folder, tensors = write_model(tmp_path / "m", MODELS[model])
    out = tmp_path / "out"
    before, after = write_quantized(folder, out, weights)
    found, held = meant(out)
    assert len(found) == 2 * len(LINEAR)
    for layer, (numbers, scales, group) in found.items():
        exact = tensors[f"{layer}.weight"].astype(np.float64)
        error = np.abs(numbers * scales - exact)
        # Three bits of mantissa behind the first one in FP8, below 2 ** -6 as there.
        step = np.maximum(np.abs(numbers) / 8, 2.0**-9) if weights == "fp8" else 1.0
        assert (error <= step * scales * 0.501).all()
        rows = np.abs(exact).reshape(len(exact), -1, group).max(axis=2)
        most = {"fp8": 448, "int8": 127, "int4": 7}[weights]
        np.testing.assert_allclose(np.repeat(rows, group, axis=1) / most, scales, rtol=1e-6)
        assert group == (exact.shape[1] if weights == "fp8" else 128 if group == 128 else 64)
    for name, tensor in tensors.items():
        if name.removesuffix(".weight") not in found:
            np.testing.assert_array_equal(held[name].view(np.uint16), tensor.view(np.uint16))
    assert before == sum(each.nbytes for each in tensors.values()) > after
    with open_checkpoint(out) as checkpoint, Engine(checkpoint, ranks=2, blocks=1) as engine:
        kept = checkpoint.as_stored(ON_HOST)
        form = {"fp8": "e4m3", "int8": "int8", "int4": "int4"}[weights]
        assert kept.formats["gate_up"].name.startswith(form)
        assert all(each.is_within(None) for each in Diff(kept, engine, IDS).all())
        assert engine.notices == ()
        assert engine.tokenizer.encode("a")


def test_mxfp4_is_that_of_the_specification(tmp_path):
    """tests/engine/test_mxfp4.py compares the rounding with it."""
    folder, tensors = write_model(tmp_path / "m", MODELS["llama"])
    write_quantized(folder, tmp_path / "out", "mxfp4")
    with open_checkpoint(tmp_path / "out") as checkpoint, Engine(checkpoint) as engine:
        kept = checkpoint.as_stored(ON_HOST)
        assert {each.name for each in kept.formats.values()} == {"mxfp4", "bfloat16"}
        up = kept.tensor("layers.0.w3").reshape(-1, SHAPE["hidden_size"])
        assert all(each.is_within(None) for each in Diff(kept, engine, IDS).all())
    exact = tensors["model.layers.0.mlp.up_proj.weight"].astype(np.float32)
    np.testing.assert_array_equal(up, MXFP4.to_float32(MXFP4.from_values(exact)))


def test_groups_of_several_sizes_and_rows_without_groups(tmp_path):
    config = LLAMA | SHAPE | {"intermediate_size": 160, "num_key_value_heads": 1}
    folder, _ = write_model(tmp_path / "m", config)
    write_quantized(folder, tmp_path / "a", "int4")
    found, _ = meant(tmp_path / "a")
    groups = {layer.rpartition(".")[2]: group for layer, (_, _, group) in found.items()}
    assert (groups["up_proj"], groups["down_proj"]) == (128, 32)
    folder, _ = write_model(tmp_path / "n", LLAMA | SHAPE | {"intermediate_size": 100})
    write_quantized(folder, tmp_path / "b", "int4")
    for each in ("a", "b"):
        with Engine(tmp_path / each) as engine:
            assert np.isfinite(engine.logits(IDS)).all()
            down = engine.formats["down"].name
        assert down == ("int4_32" if each == "a" else "bfloat16")
    config = json.loads((tmp_path / "b" / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", *(f"model.layers.{i}.mlp.down_proj" for i in range(2))]


def test_weights_of_32_bits(tmp_path):
    folder, tensors = write_model(tmp_path / "m", MODELS["qwen3"], np.float32)
    before, after = write_quantized(folder, tmp_path / "out", "int8")
    assert before == sum(each.nbytes for each in tensors.values())
    _, held = meant(tmp_path / "out")
    assert held["model.norm.weight"].dtype == np.float32 and after < before / 2


def test_what_is_refused_leaves_nothing(tmp_path, monkeypatch):
    folder, tensors = write_model(tmp_path / "m", MODELS["llama"])
    out = tmp_path / "out"

    def refused(match, model=folder, to=out, weights="int8", kind=kccl.InvalidArgument):
        with pytest.raises(kind, match=match):
            write_quantized(model, to, weights)
        assert sorted(each.name for each in tmp_path.iterdir()) == names

    names = ["m"]
    refused("must be one of 'fp8', 'int8', 'int4'", weights="int2")
    refused("exists already", to=folder)
    refused("no folder", model=folder / "model.safetensors")
    refused("has a Laneformer", model=BUNDLED)
    refused("cannot write", to=tmp_path / "none" / "out", kind=kccl.Error)
    spoilt = dict(tensors)
    name = "model.layers.1.mlp.up_proj.weight"
    spoilt[name] = tensors[name].copy()
    spoilt[name][3, 5] = np.nan
    save_file(spoilt, folder / "model.safetensors")
    refused("model.layers.1.mlp.up_proj.weight has a weight that is NaN", kind=kccl.Error)
    spoilt = dict(tensors)
    spoilt["lm_head.weight"] = tensors["lm_head.weight"].copy()
    spoilt["lm_head.weight"][0, 0] = np.inf
    save_file(spoilt, folder / "model.safetensors")
    refused("lm_head.weight has a weight that is NaN", kind=kccl.Error)
    for wrong, match in [
        ({each: tensor for each, tensor in tensors.items() if each != name}, "up_proj"),
        (tensors | {name: tensors[name][:, :32].copy()}, "up_proj.*shape"),
        (tensors | {"model.layers.1.mlp.up_proj.bias": np.ones(192, np.float32)}, "up_proj.bias"),
    ]:
        save_file(wrong, folder / "model.safetensors")
        refused(match, kind=kccl.Error)
    save_file(tensors, folder / "model.safetensors")
    refused("cannot write", to=tmp_path / ("n" * 300), kind=kccl.Error)
    refused("must be one of", weights=["int8"])
    with monkeypatch.context() as patch:

        def full(*_):
            raise safetensors.SafetensorError("no space left")

        patch.setattr("safetensors.numpy.save_file", full)
        refused("cannot write .*: no space left", kind=kccl.Error)

    def interrupted(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_quantized(folder, out, "int8", interrupted)
    assert sorted(each.name for each in tmp_path.iterdir()) == names
    write_quantized(folder, out, "int8")
    names = ["m", "out"]
    refused("is quantised already", model=out, to=tmp_path / "again")
    small, _ = write_model(tmp_path / "small", LLAMA | {"intermediate_size": 20})
    names = ["m", "out", "small"]
    for weights in KINDS:
        refused("whole groups of 32 columns", model=small, to=tmp_path / "again", weights=weights)


def test_the_perplexity_is_that_of_the_probabilities(tmp_path):
    folder, _ = write_model(tmp_path / "m", MODELS["llama"])
    with Engine(folder) as engine:
        found = perplexity(engine, IDS)
        logits = engine.logits(IDS).astype(np.float64)
        with pytest.raises(kccl.InvalidArgument, match="at least 2"):
            perplexity(engine, IDS[:1])
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    wanted = np.prod([chances[i, each] for i, each in enumerate(IDS[1:])]) ** (-1 / len(IDS[1:]))
    assert found == pytest.approx(wanted, rel=1e-9)


def test_the_command(tmp_path, capsys):
    folder, _ = write_model(tmp_path / "m", MODELS["llama"])

    def ran(*words):
        code = main(["quantize", str(folder), "out", "--weights", "int8", *words])
        return code, capsys.readouterr().err

    (tmp_path / "empty").write_text("")
    for words, told in [
        (("--tokens", "1"), "--tokens is 1, must be 0 or at least 2"),
        (("--text", "empty"), "the text has 1 token, must have at least 2"),
    ]:
        assert ran(*words) == (2, f"kccl: {told}\n")
        assert not (tmp_path / "out").exists()
    code, told = ran("--tokens", "20")
    assert code == 0, told
    first, second = told.splitlines()
    assert first.startswith("out: ") and " MB in int8, " in first
    assert second.startswith("perplexity of 20 tokens: ") and " before (" in second
    assert ran() == (2, "kccl: out exists already: name a new folder\n")
    assert main(["generate", "--model", "out", "--prompt", "a", "--max-tokens", "2"]) == 0
