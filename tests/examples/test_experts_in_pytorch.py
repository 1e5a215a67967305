"""The layer of experts in PyTorch runs without a GPU, and notices rows that go astray."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "13_experts_in_pytorch.py"
pytestmark = pytest.mark.long


def run(program, backend):
    command = [sys.executable, program, backend]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("backend", ["sim", "host"])
def test_it_runs(backend):
    done = run(EXAMPLE, backend)
    assert done.returncode == 0, done.stderr
    assert f"2 ranks on {backend}: 5 experts" in done.stdout


def test_it_checks_its_results(tmp_path):
    """Results that are those of other rows are not taken for the layer's."""
    text = EXAMPLE.read_text()
    wrong = tmp_path / "wrong.py"
    assert text.count("torch.relu(self.rows @ self.up)") == 1
    wrong.write_text(text.replace("self.rows @ self.up", "self.rows.roll(1, 1) @ self.up"))
    done = run(wrong, "host")
    assert done.returncode != 0 and "not close" in done.stderr
