"""Compares tokenizers of GGUF files with llama.cpp, whose source has vocabularies, texts and ids.

pip fetches the source into the cache. The tests are skipped where it cannot.
"""

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import kccl
from kccl.engine.files.gguf_file import GgufFile
from kccl.engine.text.tokenizer_gguf import from_gguf

pytestmark = pytest.mark.long

REQUIREMENT = "llama-cpp-python==0.3.36"
BETWEEN = "\n__ggml_vocab_test__\n"
NAMES = ("llama-bpe", "qwen2", "qwen35", "gpt-2", "mpt", "starcoder", "refact", "command-r")
NAMES += ("deepseek-llm", "deepseek-coder", "falcon", "llama-spm", "phi-3")


@pytest.fixture(scope="module")
def vocabularies():
    """The folder that has them."""
    folder = Path(kccl.cache_dir()) / "llama-cpp-vocabularies"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
        command += ["--no-binary", "llama-cpp-python", REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode != 0:
            pytest.skip(f"pip cannot fetch {REQUIREMENT}: {done.stderr.strip()[-200:]}")
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            for member in opened:
                if Path(member.name).name.startswith("ggml-vocab-"):
                    member.name = Path(member.name).name
                    opened.extract(member, folder, filter="data")
        archive.unlink()
        (folder / "done").touch()
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_ids(vocabularies, name):
    file = vocabularies / f"ggml-vocab-{name}.gguf"
    tokenizer = from_gguf(file, GgufFile(file).metadata)
    texts = Path(f"{file}.inp").read_bytes().decode().split(BETWEEN)
    lines = Path(f"{file}.out").read_text().split("\n")
    wanted = [[int(each) for each in line.split()] for line in lines]
    assert len(texts) == len(wanted) > 40
    assert [tokenizer.encode(text, add_bos=False) for text in texts] == wanted
