"""`make gpu` with steps that are made up, its processes, and the pictures of its documents."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bench_world import row
from ranks import eventually

import kccl
from kccl.bench import gpu, plot

ROOT = Path(__file__).resolve().parents[1]


def document(*rows):
    machine = {"cpu_model": "some CPU", "cpus": 2, "gpus": ["NVIDIA H200"] * 2, "ranks": 2}
    return {"machine": machine, "commit": "abc", "command": "kccl bench", "rows": list(rows)}


class Steps:
    """Takes the place of the processes: notes the commands, writes what they would print."""

    def __init__(self, num_gpus=2, codes=None):
        self.num_gpus = num_gpus
        self.codes = codes or {}
        self.names, self.limits, self.commands = [], [], []

    def __call__(self, command, limit_s, output):
        assert command[0] == sys.executable
        self.names.append(output.stem)
        self.limits.append(limit_s)
        self.commands.append(command)
        text = "# a table\n"
        if output.stem == "gpus":
            text = f"{self.num_gpus}\n"
        elif "bench" in command:
            text += json.dumps(document(row())) + "\n"
        output.write_text(text)
        return self.codes.get(output.stem, 0)


@pytest.fixture(autouse=True)
def all_there(monkeypatch):
    monkeypatch.setattr(gpu, "_is_there", lambda name: True)
    monkeypatch.setattr(gpu, "_is_built", lambda: True)


def run(tmp_path, steps, *options):
    return gpu.main(["--out", str(tmp_path / "out"), *options], steps)


BENCHES = ["all_reduce", "barrier", "broadcast"]
FEW_IN_KERNELS = ["all_reduce", "barrier"]
WITHIN = ["grid_sync", "exchange"]
ALL_IN_KERNELS = [*FEW_IN_KERNELS, *WITHIN, "all_gather", "reduce_scatter", "broadcast"]


def benches(sizes):
    """Names of the steps for these world sizes, the largest first."""
    found = []
    for size in sizes:
        inside = ALL_IN_KERNELS if size == sizes[0] else FEW_IN_KERNELS
        if size == 1:
            inside = WITHIN if size == sizes[0] else []
        first, *others = (f"{name}_{size}" for name in BENCHES)
        found += [first, *(f"{name}_in_kernel_{size}" for name in inside), *others]
    of_chunks = ["all_gather", "reduce_scatter"] if sizes[0] > 1 else []
    return [*found, *(f"{name}_{sizes[0]}" for name in of_chunks)]


def test_all_parts_on_two_gpus(tmp_path, capsys):
    steps = Steps()
    assert run(tmp_path, steps) == 0
    wanted = benches([2, 1])
    assert steps.names == ["extension", "tests", "torch", "gpus", *wanted, "plots"]
    drawn = [Path(path).stem for path in steps.commands[-1][3:]]
    assert drawn == sorted(wanted)
    assert json.loads((tmp_path / "out/barrier_1.json").read_text()) == document(row())
    printed = capsys.readouterr().out
    assert "all steps succeeded" in printed
    command = steps.commands[steps.names.index("all_reduce_2")]
    assert command[1:7] == ["-m", "kccl", "run", "-n", "2", "--"]
    assert {"--baselines", "--json", "cuda"} <= set(command)
    assert {"1K", "8K", "1M", "16M", "256M"} <= set(command)
    inside = steps.commands[steps.names.index("all_reduce_in_kernel_2")]
    assert {"--in-kernel", "--json", "cuda"} <= set(inside) and "--baselines" not in inside
    assert json.loads((tmp_path / "out/grid_sync_in_kernel_2.json").read_text())["rows"]
    exchange = steps.commands[steps.names.index("exchange_in_kernel_2")]
    assert exchange[exchange.index("-b") :][:4] == ["-b", "2K", "-f", "4"]
    alone = steps.commands[steps.names.index("all_reduce_1")]
    assert "--baselines" not in alone and "16M" not in alone


@pytest.mark.parametrize(
    ("count", "sizes"), [(1, [1]), (3, [2, 1]), (4, [4, 2, 1]), (8, [4, 2, 1])]
)
def test_world_sizes_are_those_there_are_gpus_for(count, sizes):
    names = [step.name for step in gpu.bench_steps(count)]
    assert names == benches(sizes)


@pytest.mark.parametrize("part", gpu.PARTS)
def test_parts_are_selectable(part, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/all_reduce_2.json").write_text("{}")
    steps = Steps()
    assert run(tmp_path, steps, "--parts", part) == 0
    kinds = {re.sub(r"_.*|\d", "", name) for name in steps.names} - {"extension"}
    wanted = {
        "tests": {"tests"},
        "torch": {"torch"},
        "bench": {"gpus", "all", "barrier", "broadcast", "exchange", "grid", "reduce"},
        "plots": {"plots"},
    }
    assert kinds == wanted[part]


@pytest.mark.parametrize("parts", ["", "tests benches"])
def test_a_part_that_is_none_is_refused(parts, tmp_path):
    with pytest.raises(SystemExit) as end:
        run(tmp_path, Steps(), "--parts", parts)
    assert end.value.code == 2


def test_failed_steps_are_named_and_the_others_still_run(tmp_path, capsys):
    steps = Steps(codes={"tests": 1, "barrier_2": gpu.TIMED_OUT})
    assert run(tmp_path, steps) == 1
    assert steps.names[-1] == "plots"
    printed = capsys.readouterr().out
    assert "failed: tests, barrier_2" in printed
    assert "exit code 1" in printed
    assert 'ended after 90 s: the time for one step is over, during \'{"machine"' in printed
    # Rows of a failed bench are kept: they say what was wrong.
    assert (tmp_path / "out/barrier_2.json").exists()


def test_what_the_interpreter_lacks_is_said_and_nothing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "_is_there", lambda name: name not in ("cffi", "cupy"))
    steps = Steps()
    assert run(tmp_path, steps) == 1
    assert steps.names == []
    printed = capsys.readouterr().out
    assert "lacks cffi: pip install them, or put their wheels on PYTHONPATH" in printed
    assert "cupy is not there" in printed


def test_the_extension_is_built_when_it_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "_is_built", lambda: False)
    steps = Steps(codes={"build": 1})
    assert run(tmp_path, steps) == 1
    assert steps.names == ["build"]
    assert steps.commands[0][1:] == ["setup.py", "build_ext", "--inplace"]


def test_no_gpu_and_no_documents_are_failures(tmp_path, capsys):
    assert run(tmp_path, Steps(num_gpus=0), "--parts", "bench plots") == 1
    assert "failed: bench, plots" in capsys.readouterr().out


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
    assert set(gpu.BUDGETS_S) == set(gpu.PARTS)
    assert sum(gpu.BUDGETS_S.values()) <= gpu.LIMIT_S - 20


def test_every_test_on_gpus_belongs_to_one_part(tmp_path):
    steps = Steps()
    assert run(tmp_path, steps, "--parts", "tests torch") == 0
    _, tests, torch = steps.commands
    assert tests[-2:] == ["tests/gpu", "--ignore=tests/gpu/test_torch.py"]
    assert torch[-1] == "tests/gpu/test_torch.py" and (ROOT / torch[-1]).exists()


def test_a_part_that_exceeds_its_budget_says_so_and_the_next_one_runs(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(gpu, "_READY_SHARE", 0)
    monkeypatch.setattr(gpu, "BUDGETS_S", {"tests": 0.0, "torch": 7.0, "bench": 293.0})
    steps = Steps(codes={"torch": gpu.TIMED_OUT})
    said = "tests/gpu/test_torch.py::test_one PASSED\ntests/gpu/test_torch.py::test_compile[2]"

    def execute(command, limit_s, output):
        code = steps(command, limit_s, output)
        if output.stem == "torch":
            output.write_text(said)
        return code

    assert run(tmp_path, execute, "--parts", "tests torch bench") == 1
    assert steps.names[:3] == ["extension", "torch", "gpus"] and 0 < steps.limits[1] <= 7
    printed = capsys.readouterr().out
    assert "not run: the time of the part tests, 0 s and what was left, is over" in printed
    assert (
        "ended after 7 s: the time of the part torch, 7 s and what was left, is over, during "
        "'tests/gpu/test_torch.py::test_compile[2]'"
    ) in printed


def test_a_part_has_also_what_the_parts_before_have_left(tmp_path, monkeypatch):
    """And parts that are asked for alone share all the time."""
    monkeypatch.setattr(gpu, "_READY_SHARE", 0)
    monkeypatch.setattr(gpu, "BUDGETS_S", gpu.BUDGETS_S | {"tests": 20.0, "torch": 10.0})
    steps = Steps()
    assert run(tmp_path, steps, "--parts", "tests torch", "--limit", "60") == 0
    limits = dict(zip(steps.names, steps.limits, strict=True))
    assert 35 < limits["tests"] <= 40 and 55 < limits["torch"] <= 60


# Processes


def test_a_step_that_outlives_its_limit_is_ended_with_all_that_it_started(tmp_path):
    output = tmp_path / "step.txt"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    assert gpu.execute_process([sys.executable, "-c", program], 6, output) == gpu.TIMED_OUT
    assert time.monotonic() - began < 20
    pid = int(output.read_text())
    # A killed orphan stays in the table until its new parent has looked.
    status = Path(f"/proc/{pid}/status")
    assert eventually(lambda: not status.exists() or "(zombie)" in status.read_text())


def test_a_driver_that_is_ended_ends_its_step(tmp_path):
    output = tmp_path / "step.txt"
    step = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kccl.bench import gpu\n"
        "gpu.heed_sigterm()\n"
        f"gpu.execute_process([sys.executable, '-c', {step!r}], 60, Path({str(output)!r}))\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program])
    try:
        assert eventually(lambda: output.exists() and output.read_text().strip(), 20)
        driver.terminate()
        assert driver.wait(20) == 128 + signal.SIGTERM
    finally:
        driver.kill()
    assert not Path(f"/proc/{int(output.read_text())}").exists()


def test_a_steps_output_and_exit_code_are_kept(tmp_path):
    output = tmp_path / "step.txt"
    program = (
        "import kccl, os, sys; print(kccl.__file__); print('oh', file=sys.stderr); os._exit(3)"
    )
    assert gpu.execute_process([sys.executable, "-c", program], 30, output) == 3
    assert output.read_text().splitlines() == [kccl.__file__, "oh"]


def test_make_gpu_calls_it_with_the_interpreter_given():
    done = subprocess.run(
        [
            "make",
            "-n",
            "--no-print-directory",
            "gpu",
            "PYTHON=some-python",
            "OUT=there",
            "PARTS=bench",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("PYTHONPATH=")[1].split()[1:] == [
        *("some-python", "-m", "kccl.bench.gpu", "--out", "there", "--parts", '"bench"')
    ]


# Pictures


def rows_of_a_run():
    rows = []
    for i, nbytes in enumerate((16, 1024, 65536)):
        common = {"bytes": nbytes, "dtype": "bfloat16", "floor_us": 0.755}
        ours = common | {"mode": "graph", "time_us": 2.2 + i, "skewed_us": 2.0 + i}
        rows.append(row(**ours))
        rows.append(row(**common | {"time_us": 4.0 + i, "host_us": 3.0}))
        for library, algorithm in (("nccl", "default"), ("torch_symm_mem", "one_shot")):
            peer = {
                "library": library,
                "algorithm": algorithm,
                "call": "direct",
                "time_us": 7.0 + i,
            }
            rows.append(row(**ours | peer))
            rows.append(row(**common | peer))
    return rows


def test_a_run_on_gpus_has_its_peers_in_graphs_and_both_of_kccls_modes():
    labels = [label for label, *_ in plot.series(rows_of_a_run())]
    assert labels == [
        *("kccl, in a graph", "kccl, from Python", "nccl default", "torch_symm_mem one_shot")
    ]
    sizes, times = plot.series(rows_of_a_run())[2][2:]
    assert (sizes, times) == ([16, 1024, 65536], [7.0, 8.0, 9.0])


def width(path):
    return int.from_bytes(path.read_bytes()[16:20], "big")


def test_a_document_becomes_a_picture_with_a_panel_for_skewed_runs(tmp_path):
    recorded = tmp_path / "all_reduce_2.json"
    pictures = []
    for name, rows in (
        ("skewed", rows_of_a_run()),
        ("plain", [each | {"skewed_us": None} for each in rows_of_a_run()]),
        ("one_size", [each for each in rows_of_a_run() if each["bytes"] == 16]),
    ):
        recorded.write_text("# a table\n" + json.dumps(document(*rows)) + "\n")
        pictures.append(tmp_path / f"{name}.png")
        assert plot.main([str(recorded), "--out", str(pictures[-1])]) == 0
    skewed, plain, one_size = map(width, pictures)
    assert skewed == 2 * plain == 2 * one_size


def test_records_of_other_machines_are_drawn_as_before(tmp_path):
    picture = tmp_path / "host.png"
    recorded = ROOT / "bench/records/intel-xeon-2-cores_2.jsonl"
    assert plot.main([str(recorded), "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_without_a_document_is_said(tmp_path, capsys):
    empty = tmp_path / "empty.json"
    empty.write_text("no document\n")
    recorded = tmp_path / "barrier_2.json"
    recorded.write_text(json.dumps(document(row())) + "\n")
    assert plot.main([str(empty), str(recorded)]) == 2
    assert "empty.json holds no document with rows" in capsys.readouterr().err
    # The others are drawn all the same.
    assert recorded.with_suffix(".png").exists()


def test_one_picture_is_of_one_document(tmp_path):
    with pytest.raises(SystemExit) as end:
        plot.main(["a.json", "b.json", "--out", str(tmp_path / "picture.png")])
    assert end.value.code == 2
