"""The recipes of csrc/README.md, followed in a copy of the tree: a toy algorithm of all_reduce, and
`spread`, which is broadcast under another name.
"""

import json
import re
import sys
from fnmatch import fnmatch

import pytest
from recipe_tree import Tree, build, python, run
from source_tree import ROOT, source_files, without_comments

# It builds the extension, for one element type.
pytestmark = pytest.mark.takes(36)

KERNELS = "csrc/include/kccl/kernels"
SPECS = "kccl/plan/specs.py"
COLLECTIVES = "csrc/include/kccl/collectives.cuh"
REGISTRY = "kccl/collectives/__init__.py"
TORCH = "kccl/interop/torch.py"
CHANGELOG = "CHANGELOG.md"
LOG = "bench/LOG.md"
TABLE = "kccl/plan/tables/host.json"
TABLES = "kccl/plan/tables/*.json"
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


# What finds the collective: calls, plans, documentation, random programs, a row of the bench.
FINDS_SPREAD = """
import inspect
import numpy as np
import programs
from bench_world import FakeWorld
from kccl.bench import collectives as bench_collectives
from kccl.bench.harness import problem as bench_problem

import kccl

STEPS = [step for step in programs.random_program(2, 120, seed=1, num_channels=2)
         if step.collective == "spread"]
ALGORITHMS = {"", "spread_direct_ll16", "spread_pull_simple"}

def main(comm):
    x = np.full(1000, comm.rank, np.float32)
    right = [comm.spread(x, 1) is x and (x == 1).all()]
    x[:] = comm.rank + 5
    right += [(comm.spread.prepare(x, root=1)() == 6).all()]
    if comm.backend == "host":
        assert {step.algorithm for step in STEPS} == ALGORITHMS
        programs.run_program(comm, STEPS)
    return all(right) and comm.plan("spread", 8, kccl.float32).name in comm.algorithms("spread")

assert kccl.run_threads(main, 2) == kccl.run_threads(main, 2, backend="sim") == [True, True]
assert inspect.getdoc(kccl.Communicator.spread).startswith("spread(x, root=0")

TABLE = bench_collectives.load("spread")
(PROBLEM,) = TABLE.problems([64], dtype="float32", np_dtype=np.dtype(np.float32), op="sum", root=1,
                            in_place=True, world_size=2)

def fake(comm):
    buffers = bench_problem.buffers(PROBLEM)
    call = TABLE.direct(comm, buffers, PROBLEM)
    return TABLE.check(PROBLEM, buffers, call, comm.rank, comm.gather_objects, 0)

assert FakeWorld(2).run(fake) == [0, 0]
print("right")
"""
# Calls on the simulator, which compiles this kernel alone, also behind a failure. The row of the
# matrix, and the program of recovery.
SIMULATES_SPREAD = """
import numpy as np
import sim_matrix
import sim_recovery
from sim_machine import Machine
from sim_programs import Script

KERNEL = "spread_direct_ll16"
script = Script(2, Machine(packet_bytes=64), kinds=(KERNEL,))
script.begin(threads=32)
for root in (0, 1, 1, 0):
    script.spread(0, 100, root, kernel=KERNEL)
outcome = script.run(seed=1)
assert not outcome.kind, outcome
script = Script(2, Machine(packet_bytes=64, ends_when_stuck=False))
script.go_on((KERNEL, KERNEL, KERNEL), refused=[(1, 0, 1)], threads=32)
outcome = script.run(seed=1)
assert outcome.kind == "failed_call", outcome
in_matrix = "spread" in sim_matrix.COLLECTIVES and "spread" in sim_matrix.FILLING
print(in_matrix, KERNEL in sim_recovery.KINDS)
"""
# What else derives from the files and the KernelSpecs.
TESTS_FIND_SPREAD = """
import collectives
import gpu_algorithms
import programs
import test_sanitizers
from kccl.bench.gpu import make_gpu
from kccl.tools.warm import instances

(suite, *_) = make_gpu.suites(2)
print(
    "spread" in programs.OF_DATA and "spread" in collectives.NAMES,
    "{kKcclSpreadDirectLl16, &kMovesOf_spread, false}" in test_sanitizers.kernels_h(),
    {"spread_2", "spread_in_kernel_2"} <= set(suite.benches),
    gpu_algorithms.of_gpus("spread", 2) == ["spread_direct_ll16", "spread_push_simple"],
    {"spread_direct_ll16", "spread_push_simple"} <= {kernel for kernel, *_ in instances([2])},
)
"""
PYTORCH_HAS_SPREAD = """
import kccl.interop.torch as kccl_torch
import torch

import kccl

comm = kccl.init()
kccl_torch.register(comm)
x = torch.full((2,), 5.0)
y = kccl_torch.spread(x)
x += 1
print(y.tolist(), kccl_torch.spread_(x).tolist(), "spread" in vars(kccl_torch.ProcessGroup))
"""

GUIDE = (ROOT / "csrc/README.md").read_text()
FOR_AN_ALGORITHM, FOR_A_COLLECTIVE = GUIDE.split("## Adding a")[1:]
STEPS = FOR_AN_ALGORITHM[FOR_AN_ALGORITHM.index("\n1. ") :]


NEW, EDITED = FOR_A_COLLECTIVE.split("\nThen ")[0].split("\nEdited:\n")
NEW = NEW[NEW.index("\nNew:\n") :]
# Files that name collectives for another reason.
OTHERS = {
    # Over groups all_reduce is made of steps of the others.
    "kccl/plan/forms/all_reduce.py",
    # And those that take parts of different lengths pad them, all in one way.
    "kccl/plan/forms/parts.py",
    # The exchange between nodes, of which the forms' steps consist.
    "csrc/host/nodes.cpp",
    "csrc/host/nodes.inc",
    # What all ranks of more than one group get.
    "tests/support/groups.py",
    # Their calls, and what each rank gets.
    "tests/support/parts.py",
    # Calls of the two kernels for such parts.
    "tests/sim/sim_parts.py",
    # Which rows the table of README shows.
    "bench/summary.py",
    # Calls that a GPU makes for the first time.
    "tests/support/first_uses.py",
    # Short names of kernels, for tests and for planted bugs.
    "tests/sim/sim_machine.py",
    # Kernels that are no algorithm of a collective.
    "kccl/plan/unplanned.py",
    # Those whose kernels are compiled for the usual chips only.
    "tests/support/compiled_kernels.py",
    # Random programs, of the collectives whose results NumPy gives in a line.
    "tests/collectives/collectives_soak.py",
    # Predicted times. A collective that is not there has none, and `kccl plan --machine` says so.
    "topology/cost.py",
    # Those that a chain of steps over more than 8 GPUs is made of.
    "topology/scaling.py",
    # What the interpreter of AMD's assembly runs: the collectives for GPUs that push.
    "tests/gcn/chain.cuh",
    "tests/gcn/estimate.py",
    "tests/gcn/gcn_programs.py",
    # mpi4py's calls, of which KCCL makes some. mpi.py says which, and why not the others.
    *(f"kccl/interop/mpi{part}.py" for part in ("", "_calls", "_communicator", "_opening")),
    "tests/workers/mpi_calls.py",
    "tests/workers/nccl_in_pytorch.py",
    # torch.distributed's all_reduce by two backends.
    "bench/gloo.py",
    "tests/bench/test_bench_gloo.py",
    # The calls of a process group on several machines, by the names of a communicator's.
    "kccl/interop/torch_machines.py",
    # The two fused calls as PyTorch's custom ops.
    "kccl/interop/torch_norms.py",
    # NCCL's calls, of which KCCL makes some: the choice is a table, and each is an entry point.
    "csrc/nccl/entries.cpp",
    "csrc/nccl/plan.cpp",
    "csrc/nccl/plan.h",
    "kccl/interop/nccl_tables.py",
    "kccl/interop/nccl_reaches.json",
    "bench/tune/nccl.py",
    *(f"tests/linking/{name}.cpp" for name in ("fake_launches", "ranks_of_nccl", "stub_nccl")),
    # What a GPU copies for a call between nodes. Others are refused there, by a sentence.
    "kccl/plan/pieces.py",
    "tests/workers/gpu_nodes.py",
    # A sweep over addresses, by the names of calls in kernels.
    "bench/records/nvidia-h100_2_addresses.json",
    # A program of PyTorch's, by the names of its calls.
    "bench/records/nvidia-h200_2_nccl_api.json",
    "bench/records/nvidia-h200_2_torch_steps.json",
    "bench/records/nvidia-h200_2_torch_steps_after.json",
}


def files_in(recipe, **words):
    """The files that a recipe names, with these words in place of <words>."""
    found = set()
    for each in re.findall(r"`([\w<>\[\]./]+\.\w+)`", recipe):
        for word, text in words.items():
            each = each.replace(f"<{word}>", text)
        found.add(re.sub(r"[\[\]]", "", each))
    return found


def names_collectives(path):
    """Whether a file names two collectives that have nothing else in common."""
    text = path.read_text() if path.suffix in (".py", ".json") else without_comments(path)
    text = text.replace("_", "").lower()
    return "reducescatter" in text and "allgather" in text


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout with a toy algorithm and a toy collective."""
    tree = Tree(tmp_path_factory.mktemp("recipe") / "kccl")
    tree.of_algorithm = add_algorithm(tree)
    tree.of_collective = add_collective(tree)
    return tree


def add_algorithm(tree):
    """one_shot_ll16 under another name. Returns the files that were edited, and the new ones."""
    kernel = tree.text(f"{KERNELS}/all_reduce_one_shot_ll16.cuh")
    toy = kernel.replace("one_shot", "toy").replace("OneShot", "Toy")
    (tree.folder / KERNELS / "all_reduce_toy_ll16.cuh").write_text(toy)
    tree.add_kernels("kKcclAllReduceToyLl16")
    spec = r'    KernelSpec\(\n +"all_reduce",\n +"one_shot",\n +"ll16",(?s:.*?)\n    \),\n'
    tree.repeat(SPECS, spec, "one_shot", "toy")
    first = tree.text(LOG).index("\n## ")
    entry = "\n## 2026-11-23 A toy is as fast as what it copies\n\n- Verdict: refused.\n"
    log = tree.text(LOG)
    (tree.folder / LOG).write_text(log[:first] + entry + log[first:])
    table = tree.text(TABLE)
    assert "all_reduce_one_shot_ll16" in table
    (tree.folder / TABLE).write_text(
        table.replace("all_reduce_one_shot_ll16", "all_reduce_toy_ll16")
    )
    return tree.touched()


def add_collective(tree):
    """broadcast under another name. Returns the files that were edited, and the new ones."""
    words = "broadcast", "spread"
    kernels = [path.name for path in (ROOT / KERNELS).glob("broadcast_*.cuh")]
    for file in files_in(NEW, collective="broadcast", algorithm="direct", protocol="ll16"):
        if "/kernels/broadcast_" not in file and "broadcast" in file:
            tree.copy(file, *words)
    for name in kernels:
        tree.copy(f"{KERNELS}/{name}", *words)
    tree.add_kernels(*(f"kKcclSpread{each}" for each in ("DirectLl16", "PullSimple", "PushSimple")))
    tree.repeat(SPECS, r'    KernelSpec\(\n +"broadcast",\n(?s:.*?)\n    \),\n', *words)
    tree.repeat(COLLECTIVES, r'#include "collectives/broadcast.cuh"\n', *words)
    tree.repeat(REGISTRY, r"(?m)^.*\bbroadcast\b.*\n", *words)
    touched = tree.touched()
    # What only some collectives have, and every change.
    tree.copy("kccl/interop/torch_collectives/broadcast.py", *words)
    tree.repeat(TORCH, r'(?m)^(?:from .*|    ")broadcast.*\n', *words)
    tree.change(CHANGELOG, ("### Changed\n", "### Changed\n\n- `comm.spread(x, root=0)` is new.\n"))
    return touched


def test_the_recipe_names_what_was_touched(tree):
    edited, new = tree.of_algorithm
    words = {"collective": "all_reduce", "algorithm": "toy", "protocol": "ll16"}
    assert edited | new == files_in(STEPS, **words) - {"cuda.json"}
    assert len(edited | new) == 5


def test_the_recipe_for_a_collective_names_what_was_touched(tree):
    edited, new = tree.of_collective
    assert edited == files_in(EDITED)
    assert len(edited) <= 4
    kernels = {f"{KERNELS}/{path.name}" for path in (tree.folder / KERNELS).glob("spread_*.cuh")}
    words = {"collective": "spread", "algorithm": "direct", "protocol": "ll16"}
    named = files_in(NEW, **words) - {"tests/support/moves.py"}
    assert new == named | kernels
    # The kernels count as one.
    assert len(named) <= 6


def test_the_recipe_for_a_collective_names_every_file_that_names_collectives():
    """The other tests take some collectives as examples."""
    patterns = files_in(NEW + EDITED, collective="*", algorithm="*", protocol="*") | {TABLES}
    # Where PyTorch has such a call.
    patterns |= {TORCH, "kccl/interop/torch_collectives/*.py"}
    missing = []
    for path in source_files(".", "py", "json", "cuh", "h", "hpp", "inc", "cpp"):
        where = path.relative_to(ROOT).as_posix()
        is_other = path.name.startswith("test_") or "/mutations/" in where or where in OTHERS
        is_named = any(fnmatch(where, pattern) for pattern in patterns)
        if names_collectives(path) and not is_other and not is_named:
            missing.append(where)
    assert missing == []


def test_contributing_has_no_recipe_of_its_own():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert "[csrc/README.md](csrc/README.md)" in text
    assert "new collective" not in text and "sequence.cuh" not in text


@pytest.fixture(scope="module")
def built(tree):
    """The tree, with its extension."""
    build(tree)
    return tree


@pytest.mark.long
def test_the_algorithm_is_found_built_chosen_and_right(built):
    assert python(built, FINDS_IT) == "[True, True] [True, True]\n"
    assert python(built, TESTS_FIND_IT) == "True True True True True True\n"
    tests = ("tests/house/test_facts.py", "tests/house/test_layers.py", "tests/house/test_rooms.py")
    assert " passed" in run(built, sys.executable, "-m", "pytest", "-q", *tests)


@pytest.mark.long
def test_the_collective_is_found_built_and_right(built):
    assert python(built, FINDS_SPREAD) == "right\n"
    assert python(built, TESTS_FIND_SPREAD) == "True True True True True\n"
    bench = ("-m", "kccl", "run", "-n", "2", "--", sys.executable, "-m", "kccl", "bench", "spread")
    told = run(built, sys.executable, *bench, "-b", "64", "-e", "64", "--iterations", "9", "--json")
    rows = json.loads(told.splitlines()[-1])["rows"]
    assert {row["algorithm"] for row in rows} == {"spread_pull_simple"}
    assert all(row["collective"] == "spread" and row["wrong"] == 0 for row in rows)


@pytest.mark.long
def test_the_simulator_runs_the_collective(built):
    assert python(built, SIMULATES_SPREAD) == "True True\n"
    bench = ("-m", "kccl", "bench", "spread", "--in-kernel", "--backend", "sim", "-n", "2")
    told = run(built, sys.executable, *bench, "-b", "64", "-e", "64", "--iterations", "9", "--json")
    (row,) = json.loads(told.splitlines()[-1])["rows"]
    assert (row["algorithm"], row["wrong"]) == ("spread_direct_ll16", 0)


@pytest.mark.long
def test_pytorch_has_the_collective(built):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    assert python(built, PYTORCH_HAS_SPREAD) == "[5.0, 5.0] [6.0, 6.0] True\n"
