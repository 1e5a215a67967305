"""`python -m kccl.bench.serve`: what the server costs beside engine.stream."""

import re
import subprocess
import sys

import pytest
from tiny_models import LLAMA, write_folder

URL = r"http://([\d.]+:\d+)"


@pytest.mark.long
def test_the_server_is_measured_beside_the_engine(tmp_path):
    folder = tmp_path / "model"
    write_folder(folder, LLAMA | {"max_position_embeddings": 2048}, with_tokenizer=True)
    given = ["--model", str(folder), "--blocks", "1"]
    command = [sys.executable, "-m", "kccl.bench.serve", *given]
    kccl = [sys.executable, "-m", "kccl", "serve", *given, "--port", "0"]
    with subprocess.Popen(kccl, stderr=subprocess.PIPE, text=True) as peer:
        try:
            address = next(found for line in peer.stderr if (found := re.search(URL, line)))[1]
            asked = ["--rounds", "2", "--tokens", "1000", "--turns", "1", "--peer", address]
            ran = subprocess.run([*command, *asked], capture_output=True, text=True, timeout=110)
        finally:
            peer.terminate()
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"2 rounds of \d+ tokens, medians:\n  tokens a second +[\d.]+ ", ran.stdout)
    assert re.search(r"first token later by +-?[\d.]+ ms", ran.stdout)
    assert re.search(r"second turn +[\d.]+ times sooner than the first\n  behind 3", ran.stdout)
    assert re.search(
        rf"beside {address}, 2 rounds of 1000 tokens, medians:\n +kccl +the other\n"
        r"  tokens a second +[\d.]+ +[\d.]+ +[\d.]+ times\n  first token, ms +[\d.]+ +[\d.]+\n",
        ran.stdout,
    )
