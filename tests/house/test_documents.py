"""What READMEs and examples promise: every command runs, every table comes from its record."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from device_compilers import find_nvrtc
from source_tree import identifiers, source_files
from tiny_models import LLAMA, write_folder

import kccl
from kccl.bench import readme, summary
from kccl.tools import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OF_KERNELS = (ROOT / "csrc/include/kccl/README.md").read_text()
OF_PYTORCH = (ROOT / "kccl/interop/README.md").read_text()
BIN = Path(sys.executable).parent
ENVIRONMENT = os.environ | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


# They go on until somebody ends them, or ask one that does: tests/engine/serving has their tests.
STAY = (["kccl", "chat"], ["kccl", "serve"])


def commands(text):
    """Lines of the sh blocks that end by themselves, without comments."""
    for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True)
            if words and words[:2] not in STAY and words[0] != "curl":
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


# tests/tools/test_cli.py runs it and looks at what it compiles.
WARM = "kccl warm -n 2 -d bfloat16 --op sum --arch sm_90a"


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [words for words in commands(README) if words[0] != "make" and shlex.join(words) != WARM],
    ids=shlex.join,
)
def test_readme_command(words, folder):
    if "my-model" in words:
        shape = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 1024}
        write_folder(folder / "my-model", LLAMA | shape, with_tokenizer=True)
    done = run(words, folder)
    # In 04_lost_rank one rank is killed on purpose, which `kccl run` reports.
    expected = 128 + 9 if "examples/04_lost_rank.py" in words else 0
    assert done.returncode == expected, done.stdout + done.stderr
    # What quantize tells goes with its progress.
    assert (done.stdout + done.stderr * ("my-model" in words)).strip(), done.stderr


def test_readme_says_of_each_command_what_its_help_says():
    """In the comment behind the first line of the command, more words may follow."""
    listed = {name: command.help for name, command in cli._COMMANDS.items() if "-dir" not in name}
    said = {}
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL):
        for line in block.splitlines():
            found = re.search(r"(?:^| )kccl (\w+)\b.*? # (.*)$", line)
            if found:
                said.setdefault(found[1], found[2].strip())
    assert said.keys() == listed.keys()
    assert [name for name in listed if not said[name].startswith(listed[name])] == []


def test_the_library_describes_itself_in_one_way():
    first = README.split("\n\n")[1].partition(".")[0]
    assert f"{first}." == cli.DESCRIPTION
    assert kccl.__doc__.startswith(f"KCCL: {first[0].lower()}{first[1:]}.")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["description"] == first


def python_blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_readme_python_block(folder):
    (block,) = python_blocks(README)
    # 1 + 2 = 3 on both ranks, then twice that by op().
    (folder / "block.py").write_text(block + "assert x.tolist() == [6.0] * 4, x\n")
    done = run(["mpirun", "-n", "2", "python", "block.py"], folder)
    assert done.returncode == 0, done.stderr


def test_the_checkout_does_not_shadow_the_package():
    """In its root, `kccl/` is the package that is installed, compiled core included."""
    (block,) = python_blocks(README)
    for words in (["-c", block], ["-m", "kccl", "plan", "barrier"]):
        done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_python_block_for_torch(folder):
    # The one before it is for GPUs: tests/hardware/test_processes.py.
    _, block = python_blocks(OF_PYTORCH)
    program = folder / "block.py"
    program.write_text(block + "assert x.tolist() == [2.0] * 4, x\nassert (y == 4).all()\n")
    done = run([*torchrun(program), program], folder)
    assert done.returncode == 0, done.stderr


def test_kernel_of_the_guide():
    """It compiles for GPUs, and the simulator runs it with two blocks."""
    (source,) = re.findall(r"```cpp\n(.*?)```", OF_KERNELS, re.DOTALL)
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


# Examples that need PyTorch, or whose calls other examples or tests make too.
LONG = re.compile(r"torch|fused_|02_|07_|put_signal_in_a_kernel|monokernel_step|openai_client")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.long] if LONG.search(path.stem) else [])
        for path in sorted((ROOT / "examples").glob("*.py"))
    ],
)
def test_example_runs_as_its_head_says(path, folder):
    head = path.read_text().split('"""')[1]
    starts = ("mpirun ", "kccl run ", "python ", "torchrun ")
    lines = [line for line in head.splitlines() if line.startswith(starts)]
    assert lines, f"{path.name} does not say how to run it"
    # The other ones start their ranks as threads.
    if "torch" in path.stem and lines[0].startswith("torchrun"):
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


@pytest.mark.parametrize(
    ("path", "kind"), [("README.md", "<!-- summary -->"), ("bench/README.md", "<!-- record ")]
)
def test_readme_tables_come_from_the_records(path, kind):
    text = (ROOT / path).read_text()
    assert kind in text
    assert readme.update(text, ROOT / "bench" / "records") == text


def test_measured_tables_are_in_readme_and_in_that_of_the_bench_alone():
    found = {
        path.relative_to(ROOT).as_posix()
        for path in source_files(".", "md")
        if re.search(r"^<!-- (summary|record \S+ \S+.*) -->$", path.read_text(), re.MULTILINE)
    }
    assert found == {"README.md", "bench/README.md"}


def test_the_one_table_of_readme_is_short():
    """Each line has the fastest other library of its run, and some lines show KCCL slower."""
    rows = summary.table(readme.RECORDS).splitlines()[2:-2]
    assert len(rows) == len(summary.LINES) <= 12
    ratios = [float(row.split("|")[-2]) for row in rows if row.split("|")[-2].strip()]
    assert min(ratios) < 1 < max(ratios)


def test_the_table_refuses_a_record_without_the_row(monkeypatch):
    (line, *_) = summary.LINES
    monkeypatch.setattr(summary, "LINES", [replace(line, problem={"collective": "scan"})])
    with pytest.raises(ValueError, match="has no row of all_reduce in a CUDA graph"):
        summary.table(readme.RECORDS)


@pytest.mark.parametrize(("path", "most"), [("README.md", 200), ("engine/README.md", 180)])
def test_front_doors_are_short(path, most):
    assert (ROOT / path).read_text().count("\n") <= most


def test_the_engines_glossary_is_short_and_names_what_the_code_has():
    text = (ROOT / "engine/README.md").read_text()
    _, _, rest = text.partition("| word | what it means here | in the code |\n|---|---|---|\n")
    rows = re.findall(r"^\| (.+?) \| .+ \| (.*)\|$", rest.partition("\n\n")[0], re.MULTILINE)
    words = [word for terms, _ in rows for word in terms.split(", ")]
    assert 10 <= len(words) <= 25
    known = {
        name for path in source_files("engine", "py", "cuh", "h") for name in identifiers(path)
    }
    assert {name for _, cell in rows for name in re.findall(r"`(\w+)`", cell)} <= known


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
    text = (ROOT / "bench/README.md").read_text()
    found = re.findall(r"<!-- record \S+ \S+ headline -->\n(.*?)<!-- end -->", text, re.DOTALL)
    assert found
    for table in found:
        rows = [line for line in table.splitlines() if line.startswith("|")][2:]
        assert 6 <= len(rows) <= 12
