"""What README and examples promise: every command runs, every table comes from its record."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from device_compilers import find_nvrtc

import kccl
from kccl.bench import readme

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def commands(text):
    """Lines of the sh blocks, without comments."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def run(words, folder, timeout=100):
    return subprocess.run(
        words, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout
    )


def torchrun(program):
    """The command that runs it with two ranks; skips where it cannot be run."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    if "torch.compile(" in program.read_text() and shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++")
    return ["torchrun", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def folder(tmp_path):
    """A folder with the examples, in which only the installed package can be imported."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


def test_readme_names_make_demo_and_make_test():
    assert [words for words in commands(README) if words[0] == "make"] == [
        ["make", "demo"],
        ["make", "test"],
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [words for words in commands(README) if words[0] != "make"], ids=shlex.join
)
def test_readme_command(words, folder):
    done = run(words, folder)
    # In 04_lost_rank one rank is killed on purpose, which `kccl run` reports.
    expected = 128 + 9 if "examples/04_lost_rank.py" in words else 0
    assert done.returncode == expected, done.stdout + done.stderr
    assert done.stdout.strip(), done.stderr


PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_readme_python_block(folder):
    block, _, _ = PYTHON_BLOCKS
    # 1 + 2 = 3 on both ranks, then twice that by op().
    (folder / "block.py").write_text(block + "assert x.tolist() == [6.0] * 4, x\n")
    done = run(["mpirun", "-n", "2", "python", "block.py"], folder)
    assert done.returncode == 0, done.stderr


def test_the_checkout_does_not_shadow_the_package():
    """In its root, `kccl/` is the package that is installed, compiled core included."""
    block, _, _ = PYTHON_BLOCKS
    for words in (["-c", block], ["-m", "kccl", "doctor"]):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_readme_python_block_for_torch(folder):
    # The one between them is for GPUs: tests/hardware/test_processes.py.
    _, _, block = PYTHON_BLOCKS
    program = folder / "block.py"
    program.write_text(block + "assert x.tolist() == [2.0] * 4, x\nassert (y == 4).all()\n")
    done = run([*torchrun(program), program], folder)
    assert done.returncode == 0, done.stderr


def test_readme_kernel():
    """It compiles for GPUs, and the simulator runs it with two blocks."""
    (source,) = re.findall(r"```cpp\n(.*?)```", README, re.DOTALL)
    source = "#include <kccl/kccl.cuh>\n" + source
    module = kccl.compile(source, ["mine"])

    def main(comm):
        x = np.full(14, comm.rank + 1, np.float32)
        device_comm = comm.device_comm(channels=2, max_bytes=28)
        module.kernel("mine")(comm, device_comm, x, np.uint64(7), np.int32(3), grid=2, block=64)
        return x.tolist()

    assert kccl.run_threads(main, 2, backend="sim") == [[12.0] * 14] * 2
    if find_nvrtc() is not None:
        assert kccl.compile(source, ["mine"], target="cuda", arch="sm_90a").names == ("mine",)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] if "torch" in path.stem else [])
        for path in sorted((ROOT / "examples").glob("*.py"))
    ],
)
def test_example_runs_as_its_head_says(path, folder):
    head = path.read_text().split('"""')[1]
    starts = ("mpirun ", "kccl run ", "python ", "torchrun ")
    lines = [line for line in head.splitlines() if line.startswith(starts)]
    assert lines, f"{path.name} does not say how to run it"
    if "torch" in path.stem:
        assert lines == [shlex.join([*torchrun(path), f"examples/{path.name}"])]
    for line in lines:
        done = run(shlex.split(line), folder)
        if path.stem == "04_lost_rank":
            assert done.returncode == 128 + 9, done.stdout + done.stderr
            assert "PeerLost" not in done.stderr
            assert "the process of peer 1 has ended" in done.stdout
            assert "goes on as rank 1 of 2: [2. 2. 2. 2.]" in done.stdout
        else:
            assert done.returncode == 0, done.stdout + done.stderr
            assert done.stdout.strip()


@pytest.mark.parametrize("path", ["README.md", "bench/README.md", "engine/README.md"])
def test_readme_tables_come_from_the_records(path):
    text = (ROOT / path).read_text()
    assert "<!-- record " in text
    assert readme.update(text, ROOT / "bench" / "records") == text


def test_check_names_the_files_that_are_stale(tmp_path, capsys):
    stale = tmp_path / "stale.md"
    stale.write_text("<!-- record intel-xeon-2-cores_2.jsonl barrier -->\nold\n<!-- end -->\n")
    fresh = ROOT / "bench" / "README.md"
    assert readme.main(["--check", str(fresh), str(stale)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{fresh} is up to date",
        f"{stale} is older than its records",
    ]
    assert readme.main([str(stale)]) == 0
    assert readme.main(["--check", str(stale), str(fresh)]) == 0


def test_headline_tables_are_short():
    found = re.findall(r"<!-- record \S+ \S+ headline -->\n(.*?)<!-- end -->", README, re.DOTALL)
    assert len(found) == 2
    for table in found:
        rows = [line for line in table.splitlines() if line.startswith("|")][2:]
        assert 6 <= len(rows) <= 12
