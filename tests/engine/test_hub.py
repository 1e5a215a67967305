"""Models by their names at Hugging Face, in a cache as its tools lay it out."""

import json
import os
import shutil

import pytest
from tiny_models import LLAMA, write_folder, write_gguf

import kccl
from kccl.engine import Engine
from kccl.engine.files.models import find_model
from kccl.tools.cli import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub."""
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def put(cache, repository, made, *, branch="main", commit=COMMIT):
    """Moves files into a repository: blobs, and a snapshot of links to them."""
    folder = cache / f"models--{repository.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    for name in ("blobs", "refs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "refs" / branch).write_text(commit)
    for number, file in enumerate(sorted(each for each in made.glob("**/*") if each.is_file())):
        blob = folder / "blobs" / f"{commit[:4]}{number}"
        link = snapshot / file.relative_to(made)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(file, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@pytest.fixture
def made(tmp_path):
    (tmp_path / "made").mkdir()
    return tmp_path / "made"


def test_a_mistyped_path_is_no_repository(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("models/foo.gguf", "hub/foo"):
        with pytest.raises(kccl.Error, match=f"^model '{name}' does not exist$"):
            find_model(name)


def test_weights_that_are_a_link_to_nothing(cache, made):
    write_folder(made, LLAMA)
    snapshot = put(cache, "people/model", made)
    (snapshot / "model.safetensors").resolve().unlink()
    with pytest.raises(kccl.Error, match=r"model\.safetensors is missing: run `hf download people"):
        find_model("people/model")
    with pytest.raises(kccl.Error, match="is a link to a file that does not exist: run `hf down"):
        Engine(snapshot)


def test_a_folder_of_the_cache(cache, made, capsys):
    write_folder(made, LLAMA, with_tokenizer=True)
    snapshot = put(cache, "people/model-1.5", made)
    assert find_model("people/model-1.5") == snapshot
    with Engine("people/model-1.5", blocks=1) as engine:
        answer = engine.generate("hello", max_tokens=3)
    arguments = ["--model", "people/model-1.5", "--prompt", "hello", "--max-tokens", "3"]
    assert main(["generate", *arguments, "--quiet"]) == 0
    assert capsys.readouterr().out == answer.text + "\n"


@pytest.mark.parametrize(
    ("variables", "below"),
    [
        ({"HF_HUB_CACHE": "$TOP/a"}, "a"),
        ({"HF_HOME": "{top}/a", "XDG_CACHE_HOME": "{top}/b"}, "a/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "{top}/a", "HF_HOME": "{top}/b"}, "a"),
        ({"XDG_CACHE_HOME": "{top}/a"}, "a/huggingface/hub"),
        ({"HOME": "{top}"}, ".cache/huggingface/hub"),
        ({"HOME": "{top}", "HF_HOME": "~/a"}, "a/hub"),
    ],
)
def test_where_the_cache_lies(cache, made, tmp_path, monkeypatch, variables, below):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("TOP", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(top=tmp_path))
    write_folder(made, LLAMA)
    snapshot = put(tmp_path / below, "people/model", made)
    assert find_model("people/model") == snapshot


def test_what_the_cache_does_not_have(cache):
    told = (
        f"^model 'people/model' is neither bundled, smollm2, a folder nor a GGUF file, and the "
        f"hub's cache, {cache}, does not have it: run `hf download people/model`, a command"
    )
    with pytest.raises(kccl.Error, match=told):
        find_model("people/model")
    with pytest.raises(kccl.Error, match=r"run `hf download people/model m-Q8_0\.gguf`"):
        find_model("people/model:m-Q8_0.gguf")
    for name in ("../model", "people/..", "a/b/c", "gpt2", "people/", "people/model:"):
        with pytest.raises(kccl.Error, match="is neither bundled, smollm2, a folder nor a GGUF"):
            find_model(name)


def test_a_download_that_is_not_complete(cache, made):
    write_folder(made, LLAMA)
    (made / "model.safetensors").rename(made / "part-1.safetensors")
    weight_map = {"a": "part-1.safetensors", "b": "part-2.safetensors"}
    (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    snapshot = put(cache, "people/model", made)
    told = f"^{snapshot} is not complete, part-2.safetensors is missing: run `hf download people/m"
    with pytest.raises(kccl.Error, match=told):
        find_model("people/model")
    # A file whose content has not come.
    (snapshot / "part-2.safetensors").symlink_to("../../blobs/gone")
    with pytest.raises(kccl.Error, match=told):
        find_model("people/model")
    for file in snapshot.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(kccl.Error, match=f"^{snapshot} has no weights: run `hf download people/m"):
        find_model("people/model")


def test_another_revision_is_not_taken_for_the_newest(cache, made):
    write_folder(made, LLAMA)
    snapshot = put(cache, "people/model", made, branch="v1")
    told = f"does not have the revision main: run .*; to use another revision, .* {snapshot}$"
    with pytest.raises(kccl.Error, match=told):
        find_model("people/model")
    assert find_model(snapshot) == snapshot


def test_the_newest_of_two_revisions(cache, made):
    write_folder(made, LLAMA)
    put(cache, "people/model", made)
    write_folder(made, LLAMA)
    snapshot = put(cache, "people/model", made, commit="f" * 40)
    assert find_model("people/model") == snapshot


def test_gguf_files(cache, made):
    write_gguf(made / "m-Q8_0.gguf")
    (made / "mmproj-m.gguf").write_bytes(b"")
    # What some repositories have beside their GGUF files.
    (made / "config.json").write_text("{}")
    snapshot = put(cache, "people/model-GGUF", made)
    assert find_model("people/model-GGUF") == snapshot / "m-Q8_0.gguf"
    assert find_model("people/model-GGUF:q8_0") == snapshot / "m-Q8_0.gguf"
    (made / "Q4").mkdir()
    write_gguf(made / "Q4" / "m-Q4.gguf", split=7)
    snapshot = put(cache, "people/model-GGUF", made, commit="e" * 40)
    assert find_model("people/model-GGUF").name == "m-Q4-00001-of-00003.gguf"
    (snapshot / "m-Q8_0.gguf").symlink_to(f"../{COMMIT}/m-Q8_0.gguf")
    told = "has several GGUF files, Q4/m-Q4-00001-of-00003.gguf, m-Q8_0.gguf: name one, as in peop"
    with pytest.raises(kccl.Error, match=told):
        find_model("people/model-GGUF")
    for name, wanted in (
        ("Q8_0", "m-Q8_0.gguf"),
        ("m-Q8_0.gguf", "m-Q8_0.gguf"),
        ("Q4", "Q4/m-Q4-00001-of-00003.gguf"),
        ("Q4/m-Q4-00002-of-00003.gguf", "Q4/m-Q4-00002-of-00003.gguf"),
    ):
        assert find_model(f"people/model-GGUF:{name}") == snapshot / wanted
    with Engine("people/model-GGUF:Q4", blocks=1) as engine:
        assert engine.generate("hello", max_tokens=2, stop_ids=()).end == "max_tokens"
    with pytest.raises(
        kccl.Error, match="has no GGUF file that is called Q5: run `hf download peo"
    ):
        find_model("people/model-GGUF:Q5")


def test_paths_come_first(cache, made, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_folder(made, LLAMA)
    (tmp_path / "people" / "model").mkdir(parents=True)
    assert str(find_model("people/model")) == "people/model"
    assert find_model("~/made") == made
    assert str(find_model("./made")) == "made"
