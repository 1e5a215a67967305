"""Some random programs on the host, with processes that are killed: collectives_soak.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).with_name("collectives_soak.py")


def soak(*words):
    """The lines that it prints, and its exit code."""
    command = [sys.executable, str(SOAK), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stderr == "", done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


@pytest.mark.long
def test_random_programs():
    """A quarter of a minute. `make collectives-soak` takes longer."""
    (*found, whole), code = soak("--minutes", 0.25)
    assert (found, code, whole["wrong"]) == ([], 0, 0), found
    assert whole["jobs"] > 0


def test_a_wrong_result_is_found_and_its_job_repeats(monkeypatch, tmp_path):
    """What KCCL computes is right, so here the oracle's results are wrong."""
    (tmp_path / "sitecustomize.py").write_text(
        "import oracle\nright = oracle.all_reduce\n"
        "oracle.all_reduce = lambda inputs, op: right(inputs[::-1][:1] + inputs[1:], op)\n"
    )
    support = Path(__file__).resolve().parents[1] / "support"
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{support}")
    told = []
    for job in range(20):
        (*found, whole), code = soak("--job", job)
        assert (code, whole["wrong"]) == (len(found), len(found))
        told += found
        if found:
            break
    assert told and "AssertionError" in json.dumps(told)
