"""`python -m kccl.bench.gloo`: torch.distributed with the backends "kccl" and "gloo", in turn."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

pytestmark = pytest.mark.long


@pytest.mark.takes(20)
def test_both_backends_are_checked_and_timed():
    start = [sys.executable, "-m", "kccl", "run", "-n", "2", "--"]
    command = [*start, sys.executable, "-m", "kccl.bench.gloo", "--json", "--repeats", "2"]
    given = ["--sizes", "8", "4096", "--models", "mlp"]
    ran = subprocess.run([*command, *given], capture_output=True, text=True, timeout=110)
    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert document["machine"]["ranks"] == 2 and document["machine"]["torch"]
    rows = document["rows"]
    assert [(row["library"], row["collective"], row["bytes"]) for row in rows] == [
        *((each, "all_reduce", nbytes) for nbytes in (8, 4096) for each in ("kccl", "gloo")),
        *((each, "ddp_step", 264_192) for each in ("kccl", "gloo", "none")),
    ]
    assert all(0 < row["q1_us"] <= row["time_us"] <= row["q3_us"] for row in rows)
    assert all(row["wrong"] == 0 and row["repeats"] == 2 for row in rows)
    assert all(("busy" in row["notes"]) == (row["others"] > 0.05) for row in rows)
    assert "gloo / kccl" in ran.stderr and ran.stderr.count("all_reduce") == 2


@pytest.mark.takes(20)
def test_a_wrong_sum_is_counted_and_ends_with_an_error(tmp_path):
    program = tmp_path / "broken.py"
    program.write_text("""
import sys
import kccl.bench.gloo as bench
import kccl.interop.torch
from kccl.interop.torch_group import ProcessGroup

right = ProcessGroup.allreduce

def wrong(self, tensors, opts=None):
    work = right(self, tensors, opts)
    tensors[0].view(-1)[:1] += 1
    return work

ProcessGroup.allreduce = wrong
sys.exit(bench.main(["--sizes", "64", "--models", "--repeats", "1"]))
""")
    start = [sys.executable, "-m", "kccl", "run", "-n", "2", "--", sys.executable, str(program)]
    ran = subprocess.run(start, capture_output=True, text=True, timeout=110)
    assert ran.returncode != 0 and "WRONG" in ran.stdout, ran.stdout + ran.stderr
