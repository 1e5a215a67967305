"""Damaged files: whatever is cut off or changed, a model loads or ends in one line."""

import random
import re
import shutil

import pytest
from loading import outcome
from long import long_after
from quantized_folders import MODEL, tensors_of
from quantized_folders import write_folder as write_quantised
from tiny_models import LANEFORMER, write_folder, write_gguf

NUM_FLIPS = 100
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
FILES += ("generation_config.json",)
IN_JSON = b'0123456789-eE".,:[]{} \\tfnu'


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder of each kind, whole."""
    at = tmp_path_factory.mktemp("models")
    write_folder(at / "folder", LANEFORMER, with_tokenizer=True)
    write_gguf(at / "m.gguf")
    return at


def damage(content, noise, header):
    """Changes some bytes, most of them in the header: to ones that make numbers large, or to
    characters that have a meaning in JSON.
    """
    changed = bytearray(content)
    for _ in range(noise.choice((1, 1, 1, 2, 8))):
        end = len(changed) if noise.random() < 0.2 else min(header, len(changed))
        at = noise.randrange(end)
        flipped = changed[at] ^ 1 << noise.randrange(8)
        changed[at] = noise.choice((0, 0xFF, 0x7F, flipped, *noise.choices(IN_JSON, k=6)))
    return bytes(changed)


def cuts(content, noise):
    """The content's beginnings: short ones, and some others."""
    lengths = [*range(0, 64, 7), *(noise.randrange(len(content)) for _ in range(20))]
    return [content[:length] for length in lengths if length < len(content)]


def check(model, file, content, noise, header):
    """Loads the model with this file damaged in many ways."""
    told = set()
    damaged = [damage(content, noise, header) for _ in range(NUM_FLIPS)]
    for each in [*cuts(content, noise), *damaged]:
        file.write_bytes(each)
        told.add(re.sub(r"\d+", "N", outcome(model)))
    # Many checks were reached, and not every change is one.
    assert len(told) > 8, told


@pytest.mark.long
@pytest.mark.parametrize("seed", long_after(1, range(2)))
def test_damaged_gguf(models, tmp_path, seed):
    file = tmp_path / "m.gguf"
    content = (models / "m.gguf").read_bytes()
    # The metadata, the tokens' texts among them, and the tensors' places.
    check(file, file, content, random.Random(seed), header=len(content) - 4 * 300 * 16)


@pytest.mark.parametrize("name", long_after(2, FILES))
def test_damaged_folder(models, tmp_path, name):
    folder = tmp_path / "folder"
    shutil.copytree(models / "folder", folder)
    content = (folder / name).read_bytes()
    check(folder, folder / name, content, random.Random(7), header=4000)


@pytest.mark.parametrize("name", long_after(1, ("gptq 64", "fp8 blocks", "int4 128 zeros")))
def test_damaged_quantised_folder(tmp_path, name):
    config = MODEL | {"num_hidden_layers": 1}
    folder = write_quantised(tmp_path / "m", name, tensors_of(name, config)[0], config)
    # It has no tokenizer, which is read after all tensors.
    assert "has neither tokenizer.json" in outcome(folder)
    file = folder / "model.safetensors"
    check(folder, file, file.read_bytes(), random.Random(3), header=3500)


def test_the_whole_files_load(models):
    assert outcome(models / "folder") == outcome(models / "m.gguf") == "loaded"
