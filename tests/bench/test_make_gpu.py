"""`make gpu` with fake steps: which commands it runs, and what it reports."""

import json
import re
import sys
from pathlib import Path

import pytest
from bench_world import gpu_document, row

from kccl.bench.gpu import make_gpu, suite
from kccl.bench.gpu import steps as gpu_steps

ROOT = Path(__file__).resolve().parents[2]


class Steps:
    """Replaces the processes: records the commands and writes what they would print."""

    def __init__(self, num_gpus=2, codes=None, crashing=()):
        self.num_gpus = num_gpus
        self.codes = codes or {}
        self.crashing = crashing
        self.names, self.limits, self.commands, self.benches = [], [], [], []

    def __call__(self, command, limit_s, output):
        command = list(command)
        assert command[0] == sys.executable
        self.names.append(output.stem)
        self.limits.append(limit_s)
        self.commands.append(command)
        text = "# a table\n"
        if output.stem == "gpus":
            text = f"cuda {self.num_gpus}\n"
        if output.stem.startswith("decode_") and "bench" in command:
            text += json.dumps(gpu_document(row())) + "\n"
        for name in benches_of(command):
            if name in self.crashing:
                break
            self.benches.append(name)
            (output.parent / f"{name}.json").write_text(json.dumps(gpu_document(row())) + "\n")
        output.write_text(text)
        return self.codes.get(output.stem, 0)


def benches_of(command):
    """Names of the benches of a job of bench/gpu/suite.py."""
    if "kccl.bench.gpu.suite" not in command:
        return []
    return [suite.parse(bench)[0] for bench in command[command.index("--out") + 2 :]]


def arguments(steps, name):
    """The arguments of `kccl bench` for this document."""
    (found,) = (
        each for command in steps.commands for each in command if each.startswith(f"{name}: ")
    )
    return suite.parse(found)[1]


@pytest.fixture(autouse=True)
def all_there(monkeypatch):
    monkeypatch.setattr(make_gpu, "_is_there", lambda name: True)


def run(tmp_path, steps, *options):
    return make_gpu.main(["--out", str(tmp_path / "out"), *options], steps)


READY = ["build", "extension", "gpus", "kernels"]
BENCHES = ["all_reduce", "barrier", "broadcast"]
FEW_IN_KERNELS = ["all_reduce", "barrier"]
WITHIN = ["grid_sync", "exchange"]
ONCE = [
    "all_gather",
    "all_reduce_rms_norm",
    "all_to_all",
    "gather",
    "reduce",
    "reduce_scatter",
    "scan",
    "scatter",
    "send_recv",
]
ALL_IN_KERNELS = [
    *FEW_IN_KERNELS,
    *WITHIN,
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "broadcast",
]


def benches(sizes):
    """Names of the steps for these world sizes, the largest first."""
    found = []
    for size in sizes:
        inside = ALL_IN_KERNELS if size == sizes[0] else FEW_IN_KERNELS
        if size == 1:
            inside = WITHIN if size == sizes[0] else []
        first, *others = BENCHES
        if size == sizes[0] and size > 1:
            others += ONCE
        found.append(f"{first}_{size}")
        found += [f"{name}_in_kernel_{size}" for name in inside]
        found += [f"{name}_{size}" for name in others]
    return found


def test_all_parts_on_two_gpus(tmp_path, capsys):
    steps = Steps()
    assert run(tmp_path, steps) == 0
    wanted = benches([2])
    assert steps.names == [*READY, "tests", "torch", "benches_2", "plots"]
    # To save time: of tests that differ only in the number of ranks, those with most GPUs.
    for name in ("tests", "torch"):
        assert steps.commands[steps.names.index(name)][-2:] == ["--most-of", "2"]
    assert steps.benches == wanted
    drawn = [Path(path).stem for path in steps.commands[-1][3:]]
    assert drawn == sorted(wanted)
    assert json.loads((tmp_path / "out/barrier_2.json").read_text()) == gpu_document(row())
    printed = capsys.readouterr().out
    assert "all steps succeeded" in printed
    job = steps.commands[steps.names.index("benches_2")]
    assert job[1:7] == ["-m", "kccl", "run", "-n", "2", "--"]
    command = arguments(steps, "all_reduce_2")
    assert {"--baselines", "--json", "cuda"} <= set(command)
    assert {"1K", "8K", "1M", "16M", "256M"} <= set(command)
    inside = arguments(steps, "all_reduce_in_kernel_2")
    assert {"--in-kernel", "--json", "cuda"} <= set(inside) and "--baselines" not in inside
    assert json.loads((tmp_path / "out/grid_sync_in_kernel_2.json").read_text())["rows"]
    exchange = arguments(steps, "exchange_in_kernel_2")
    assert exchange[exchange.index("-b") :][:4] == ["-b", "2K", "-f", "4"]


def test_benches_alone_are_of_all_world_sizes(tmp_path):
    steps = Steps()
    assert run(tmp_path, steps, "--parts", "bench plots") == 0
    assert steps.names == [*READY, "benches_2", "benches_1", "plots"]
    assert steps.benches == benches([2, 1])
    alone = arguments(steps, "all_reduce_1")
    assert "--baselines" not in alone and "16M" not in alone


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (3, [2, 1]), (4, [4, 2, 1]), (8, [4, 2, 1])]
)
def test_world_sizes_are_those_there_are_gpus_for(count, sizes):
    found = make_gpu.suites(count)
    assert [suite.world_size for suite in found] == sizes
    assert [name for suite in found for name in suite.benches] == benches(sizes)
    # Long messages run on the most GPUs only, and not on one GPU.
    assert ["256M" in suite.benches[f"all_reduce_{suite.world_size}"] for suite in found] == [
        size == sizes[0] > 1 for size in sizes
    ]


@pytest.mark.parametrize("part", make_gpu.PARTS)
def test_parts_are_selectable(part, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/all_reduce_2.json").write_text("{}")
    steps = Steps()
    assert run(tmp_path, steps, "--parts", part) == 0
    kinds = {re.sub(r"es_\d$", "es", name) for name in steps.names}
    wanted = {
        "tests": {*READY, "tests"},
        "torch": {*READY, "torch"},
        "nccl": {"build", "extension", "gpus", "nccl"},
        "bench": {*READY, "benches"},
        "decode": {"build", "extension", "gpus", "decode_tests", *make_gpu.shapes_of(2)},
        "plots": {"build", "extension", "plots"},
    }
    assert kinds == wanted[part]
    # Benches have kernels of their own, and sum only bfloat16. Tests reduce every type.
    for name, command in zip(steps.names, steps.commands, strict=True):
        if name == "kernels":
            of_benches = ["-m", "kccl.bench.gpu.warm", "-n", "2", "1"]
            own = ["-m", "kccl", "warm", "-n", "2", "1"]
            few = ["-d", "bfloat16", "--op", "sum"] if part == "bench" else []
            assert command[1:] == (own if part == "torch" else of_benches) + few


def test_what_is_not_compiled_ahead_is_no_failure(tmp_path, capsys):
    for code, said in ((gpu_steps.TIMED_OUT, "ended after 25 s"), (1, "exit code 1")):
        steps = Steps(codes={"kernels": code})
        assert run(tmp_path, steps, "--parts", "bench") == 0
        printed = capsys.readouterr().out
        assert f"# kernels: {said}" in printed and "the run continues without it" in printed
        assert "all steps succeeded" in printed


@pytest.mark.parametrize("parts", ["", "tests benches"])
def test_a_part_that_is_none_is_refused(parts, tmp_path):
    with pytest.raises(SystemExit) as end:
        run(tmp_path, Steps(), "--parts", parts)
    assert end.value.code == 2


def test_failed_steps_are_named_and_the_others_still_run(tmp_path, capsys):
    steps = Steps(codes={"tests": 1, "benches_2": gpu_steps.TIMED_OUT}, crashing=["broadcast_2"])
    assert run(tmp_path, steps) == 1
    assert steps.names[-1] == "plots"
    printed = capsys.readouterr().out
    assert "failed: tests, benches_2, broadcast_2" in printed
    assert "exit code 1" in printed
    assert re.search(r"ended after \d+ s: .* is over, during '# a table'", printed)
    assert "no document: see benches_2.txt" in printed
    # What was measured before is kept. The benches behind it run in a second job.
    again = steps.commands[steps.names.index("benches_2_2")]
    assert benches_of(again) == benches([2])[benches([2]).index("broadcast_2") + 1 :]
    assert steps.benches == [name for name in benches([2]) if name != "broadcast_2"]


def test_documents_of_an_earlier_run_are_not_taken_for_this_ones(tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/barrier_1.json").write_text("{}")
    steps = Steps(num_gpus=1, crashing=["barrier_1"])
    assert run(tmp_path, steps, "--parts", "bench") == 1
    assert not (tmp_path / "out/barrier_1.json").exists()
    assert "barrier_1" in capsys.readouterr().out.split("failed:")[1]


def test_what_the_interpreter_lacks_is_said_and_nothing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(make_gpu, "_is_there", lambda name: name not in ("cffi", "cupy"))
    steps = Steps()
    assert run(tmp_path, steps) == 1
    assert steps.names == []
    printed = capsys.readouterr().out
    assert "lacks cffi: pip install them, or put their wheels on PYTHONPATH" in printed
    assert "cupy is not installed" in printed


def test_nothing_runs_when_the_extension_cannot_be_built(tmp_path):
    steps = Steps(codes={"build": 1})
    assert run(tmp_path, steps) == 1
    assert steps.names == ["build"]
    assert steps.commands[0][1:] == ["setup.py", "build_ext", "--inplace"]


def test_decoding_has_documents_with_peers(tmp_path):
    steps = Steps()
    assert run(tmp_path, steps, "--parts", "decode") == 0
    (both,) = (command for command in steps.commands if "2" in command and "run" in command)
    assert both[1:6] == ["-m", "kccl", "run", "-n", "2"]
    assert {"--baselines", "laneformer-2b", "cuda"} <= set(both)
    document = json.loads((tmp_path / "out/decode_laneformer-2b_2.json").read_text())
    assert document == gpu_document(row())


@pytest.mark.parametrize("part", ["tests", "torch", "bench", "decode"])
def test_no_gpu_and_no_documents_are_failures(part, tmp_path, capsys):
    steps = Steps(num_gpus=0)
    assert run(tmp_path, steps, "--parts", f"{part} plots") == 1
    assert steps.names == ["build", "extension", "gpus"]
    assert "failed: gpus, plots" in capsys.readouterr().out


def test_no_step_begins_when_the_time_is_over(tmp_path, capsys):
    steps = Steps()
    assert run(tmp_path, steps, "--limit", "-1") == 1
    assert steps.names == []
    assert "the time for all steps is over" in capsys.readouterr().out


def test_a_step_has_at_most_what_is_left(tmp_path):
    steps = Steps()
    assert run(tmp_path, steps, "--limit", "40") == 0
    assert all(0 < limit_s <= 40 for limit_s in steps.limits)


def test_parts_and_getting_ready_fit_into_the_time_for_all():
    assert set(make_gpu.BUDGETS_S) == set(make_gpu.PARTS)
    for parts in (make_gpu.USUAL_PARTS, ("nccl",), ("decode",)):
        assert sum(make_gpu.BUDGETS_S[part] for part in parts) <= make_gpu.LIMIT_S - 20


def test_every_test_on_gpus_belongs_to_one_part(tmp_path):
    steps = Steps()
    assert run(tmp_path, steps, "--parts", "tests torch nccl decode") == 0
    tests, *parts = (
        steps.commands[steps.names.index(name)]
        for name in ("tests", "torch", "nccl", "decode_tests")
    )
    others = [each for part in parts for each in part if each.startswith("tests/hardware/")]
    names = ("torch", "torch_scripts", "nccl_api", "decode")
    assert others == [f"tests/hardware/test_{name}.py" for name in names]
    assert all((ROOT / other).exists() for other in others)
    assert tests[-5:] == ["tests/hardware", *(f"--ignore={other}" for other in others)]
    assert "--most-of" not in tests


@pytest.mark.parametrize(("num_gpus", "workers"), [(4, "2"), (8, "4")])
def test_tests_run_side_by_side_on_pairs_of_gpus(num_gpus, workers, tmp_path):
    steps = Steps(num_gpus)
    assert run(tmp_path, steps, "--parts", "tests torch") == 0
    names = [f"{part}_of_{which}" for part in ("tests", "torch") for which in ("pairs", "four")]
    assert steps.names == [*READY, *names]
    for pairs, four in (steps.commands[-4:-2], steps.commands[-2:]):
        assert pairs[-6:] == ["-n", workers, "--dist", "loadgroup", "--world-sizes", "1,2"]
        # Under xdist pytest's durations are wrong.
        times = ["-o", "console_output_style=times"]
        assert four == [*pairs[:3], *times, *pairs[3:-6], "--world-sizes", "4"]


def test_without_xdist_the_tests_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(make_gpu, "_is_there", lambda name: name != "xdist")
    steps = Steps(num_gpus=4)
    assert run(tmp_path, steps, "--parts", "tests") == 0
    assert steps.names == [*READY, "tests"]


def test_a_part_that_exceeds_its_budget_says_so_and_the_next_one_runs(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(make_gpu, "_READY_SHARE", 0)
    monkeypatch.setattr(make_gpu, "BUDGETS_S", {"tests": 0.0, "torch": 7.0, "bench": 293.0})
    steps = Steps(codes={"torch": gpu_steps.TIMED_OUT})
    said = "hardware/test_torch.py::test_one PASSED\nhardware/test_torch.py::test_compile[2]"

    def execute(command, limit_s, output):
        code = steps(command, limit_s, output)
        if output.stem == "torch":
            output.write_text(said)
        return code

    assert run(tmp_path, execute, "--parts", "tests torch bench") == 1
    assert steps.names[: len(READY) + 1] == [*READY, "torch"]
    assert 0 < steps.limits[len(READY)] <= 7
    printed = capsys.readouterr().out
    assert "not run: the time of the part tests, 0 s and what was left, is over" in printed
    assert (
        "ended after 7 s: the time of the part torch, 7 s and what was left, is over, during "
        "'hardware/test_torch.py::test_compile[2]'"
    ) in printed


def test_side_by_side_the_tests_without_a_result_are_named(tmp_path, monkeypatch, capsys):
    said = (
        "tests/hardware/test_torch.py::test_one[2] \n"
        "tests/hardware/test_torch.py::test_two[2] \n"
        "[gw1] [ 50%] PASSED tests/hardware/test_torch.py::test_two[2] \n"
        "tests/hardware/test_torch.py::test_three[a-2] \n"
        "[gw1] [ 75%] SKIPPED (no reason) tests/hardware/test_torch.py::test_three[a-2] \n"
    )

    def execute(command, limit_s, output):
        output.write_text("cuda 4\n" if output.stem == "gpus" else said)
        return gpu_steps.TIMED_OUT if output.stem == "torch_of_pairs" else 0

    assert run(tmp_path, execute, "--parts", "torch") == 1
    assert (
        "is over, during 'tests/hardware/test_torch.py::test_one[2]'\n" in capsys.readouterr().out
    )


def test_a_part_has_also_what_the_parts_before_have_left(tmp_path, monkeypatch):
    """Parts that are selected share the time of those that are not."""
    monkeypatch.setattr(make_gpu, "_READY_SHARE", 0)
    monkeypatch.setattr(make_gpu, "BUDGETS_S", make_gpu.BUDGETS_S | {"tests": 20.0, "torch": 10.0})
    steps = Steps()
    assert run(tmp_path, steps, "--parts", "tests torch", "--limit", "60") == 0
    limits = dict(zip(steps.names, steps.limits, strict=True))
    assert 35 < limits["tests"] <= 40 and 55 < limits["torch"] <= 60
