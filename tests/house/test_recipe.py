"""The recipes of csrc/README.md: that for an algorithm followed with a toy in a copy of the tree,
and that for a collective compared with the files that name the collectives there are.
"""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from source_tree import ROOT, source_files, without_comments

# It builds the extension, for one element type.
pytestmark = pytest.mark.timeout(400)

KERNELS = "csrc/include/kccl/kernels"
ABI = "csrc/include/kccl/abi.inc"
SPECS = "kccl/plan/specs.py"
SEQUENCE = "tests/kernels/sequence.cuh"
LOG = "bench/LOG.md"
TABLE = "kccl/plan/tables/host.json"
TABLES = "kccl/plan/tables/*.json"
NOT_SOURCE = (".*", "build", "dist", "out", "*.egg-info", "*.so", "__pycache__", "kccl._*.cpp")
FINDS_IT = """
import numpy as np
import kccl

TOY = "all_reduce_toy_ll16"

def main(comm):
    assert TOY in comm.algorithms("all_reduce")
    x = np.arange(1000, dtype=np.float32) * (comm.rank + 1)
    comm.all_reduce(x, algorithm=TOY)
    if comm.backend == "host":
        assert comm.plan("all_reduce", 4, kccl.float32).name == TOY
    return x.tolist() == (np.arange(1000) * 3).tolist()

print(kccl.run_threads(main, 2), kccl.run_threads(main, 2, backend="sim"))
"""
# The lists of the tests on the host, under sanitizers, on the simulator and on GPUs, and what is
# compiled for GPUs.
TESTS_FIND_IT = """
import gpu_algorithms
import programs
import sim_machine
import sim_matrix
import test_sanitizers
from kccl.tools.warm import instances

TOY = "all_reduce_toy_ll16"
print(
    TOY in programs.algorithms_for("all_reduce", 2, "float32"),
    "{kKcclAllReduceToyLl16," in test_sanitizers.kernels_h(),
    TOY in sim_machine.ALL_KINDS,
    TOY in sim_matrix.COLLECTIVES and TOY in sim_matrix.FILLING,
    TOY in {algorithm for *_, algorithm in gpu_algorithms.reductions(2)},
    TOY in {kernel for kernel, *_ in instances([2])},
)
"""


GUIDE = (ROOT / "csrc/README.md").read_text()
FOR_AN_ALGORITHM, FOR_A_COLLECTIVE = GUIDE.split("## Adding a")[1:]


def recipe():
    """The files that the recipe for an algorithm names."""
    return set(re.findall(r"^\d\. `([^`]+)`", FOR_AN_ALGORITHM, re.MULTILINE))


def names_collectives(path):
    """Whether a file names two collectives that have nothing else in common."""
    text = path.read_text() if path.suffix in (".py", ".json") else without_comments(path)
    text = text.replace("_", "").lower()
    return "reducescatter" in text and "allgather" in text


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout with a toy algorithm: one_shot_ll16 under another name."""
    tree = tmp_path_factory.mktemp("recipe") / "kccl"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SOURCE))

    def change(file, *changes):
        text = (tree / file).read_text()
        for before, after in changes:
            assert text.count(before) == 1, f"{file} changed: {before} is not there once"
            text = text.replace(before, after)
        (tree / file).write_text(text)

    kernel = (tree / KERNELS / "all_reduce_one_shot_ll16.cuh").read_text()
    toy = kernel.replace("one_shot", "toy").replace("OneShot", "Toy")
    (tree / KERNELS / "all_reduce_toy_ll16.cuh").write_text(toy)
    num_kernels = int(re.search(r"kKcclNumKernels = (\d+)", (tree / ABI).read_text())[1])
    change(
        ABI,
        (
            f"    kKcclNumKernels = {num_kernels}",
            f"    kKcclAllReduceToyLl16 = {num_kernels},\n    kKcclNumKernels = {num_kernels + 1}",
        ),
    )
    specs = (tree / SPECS).read_text()
    (spec,) = re.findall(
        r'    KernelSpec\(\n +"all_reduce",\n +"one_shot",\n +"ll16",.*?\n    \),\n',
        specs,
        re.DOTALL,
    )
    change(SPECS, (spec, spec + spec.replace("one_shot", "toy")))
    include = "#include <kccl/kernels/all_reduce_two_shot_sentinel.cuh>\n"
    (made,) = re.findall(
        r"    if constexpr \(has<KERNELS>\(kKcclAllReduceOneShotLl16\)\) {\n.*?\n    }\n",
        (tree / SEQUENCE).read_text(),
        re.DOTALL,
    )
    toys = made.replace("OneShot", "Toy").replace("one_shot", "toy")
    change(
        SEQUENCE,
        (include, "#include <kccl/kernels/all_reduce_toy_ll16.cuh>\n" + include),
        (made, made + toys),
    )
    log = (tree / LOG).read_text()
    first = log.index("\n## ")
    entry = "\n## 2026-11-23 A toy is as fast as what it copies\n\n- Verdict: refused.\n"
    (tree / LOG).write_text(log[:first] + entry + log[first:])
    table = (tree / TABLE).read_text()
    assert "all_reduce_one_shot_ll16" in table
    (tree / TABLE).write_text(table.replace("all_reduce_one_shot_ll16", "all_reduce_toy_ll16"))
    return tree


def changed(tree):
    """Files of the copy that are not as in the checkout."""
    files = {path.relative_to(tree) for path in tree.rglob("*") if path.is_file()}
    return {
        file.as_posix()
        for file in files
        if not (ROOT / file).is_file() or (ROOT / file).read_bytes() != (tree / file).read_bytes()
    }


def run(tree, *command, **variables):
    done = subprocess.run(
        command,
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def test_the_recipe_names_what_was_touched(tree):
    touched = changed(tree)
    assert len(touched) <= 6
    names = recipe()
    assert f"{KERNELS}/<collective>_<algorithm>[_<protocol>].cuh" in names
    assert touched == {*(name for name in names if "<" not in name)} | {
        f"{KERNELS}/all_reduce_toy_ll16.cuh"
    }


def test_the_recipe_for_a_collective_names_every_file_that_names_collectives():
    """The other tests take some collectives as examples."""
    named = set(re.findall(r"`([\w<>.]+/[^` ]+\.\w+)`", FOR_A_COLLECTIVE))
    patterns = [re.sub(r"\[?_?<\w+>\]?", "*", each) for each in {*named, *recipe(), TABLES}]
    missing = []
    for path in source_files(".", "py", "json", "cuh", "h", "hpp", "inc", "cpp"):
        where = path.relative_to(ROOT).as_posix()
        is_other = path.name.startswith("test_") or "/mutations/" in where
        is_named = any(fnmatch(where, pattern) for pattern in patterns)
        if names_collectives(path) and not is_other and not is_named:
            missing.append(where)
    assert missing == []
    for each in named:
        text = (ROOT / each.replace("<collective>", "broadcast")).read_text()
        assert re.search("reduce_scatter|broadcast", text), f"{each} names no collective"


def test_contributing_has_no_recipe_of_its_own():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "[csrc/README.md](csrc/README.md)" in text
    assert "new collective" not in text and "sequence.cuh" not in text


def test_the_algorithm_is_found_built_chosen_and_right(tree):
    # For one element type and without optimisation: it builds in a tenth of the time.
    dtypes, setup = tree / "kccl/base/dtypes.py", tree / "setup.py"
    text = dtypes.read_text()
    one = re.sub(r"^ALL = .*", "ALL = (float32,)", text, flags=re.MULTILINE)
    slow = setup.read_text().replace('"-O2"', '"-O0"')
    assert one != text and slow != setup.read_text()
    dtypes.write_text(one)
    setup.write_text(slow)
    run(tree, sys.executable, "setup.py", "-q", "build_ext", "--inplace")
    dtypes.write_text(text)
    assert run(tree, sys.executable, "-c", FINDS_IT) == "[True, True] [True, True]\n"
    folders = [tree / "tests" / each for each in ("support", "sim", "hardware", "csrc")]
    path = os.pathsep.join(map(str, (tree, *folders)))
    told = run(tree, sys.executable, "-c", TESTS_FIND_IT, PYTHONPATH=path)
    assert told == "True True True True True True\n"
    tests = ("tests/house/test_facts.py", "tests/house/test_layers.py")
    assert " passed" in run(tree, sys.executable, "-m", "pytest", "-q", *tests)
