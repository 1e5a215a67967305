"""The processes of `make gpu`: its steps, and how it divides tests/hardware."""

import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest
from ranks import eventually

import kccl
from kccl.bench.gpu import steps

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long


def run_pytest(*options):
    """What it prints."""
    # -P: the installed kccl, not the tree's, which may lack the extension.
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_test_on_gpus_is_of_one_of_the_world_sizes():
    def collected(*options):
        printed = run_pytest("tests/hardware", "--collect-only", *options)
        return [line for line in printed.splitlines() if "::" in line]

    parts = [collected("--world-sizes", sizes) for sizes in ("1,2", "4")]
    assert all(parts) and sorted(chain(*parts)) == sorted(collected())


def test_of_each_test_on_gpus_there_is_one_with_most_ranks(tmp_path):
    """--most-of takes each test's largest world size up to a limit; --world-sizes filters these."""
    sizes = {"test_all": (1, 2, 4), "test_few": (1, 2), "test_two": (2,), "test_many": (2, 4)}
    (tmp_path / "conftest.py").write_text((ROOT / "tests/hardware/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        + "".join(
            f"@pytest.mark.parametrize('kind', 'ab')\n"
            f"@pytest.mark.parametrize('world_size', {each})\n"
            f"def {name}(world_size, kind): ...\n"
            for name, each in sizes.items()
        )
        + "def test_alone(): ...\n"
    )

    def chosen(*options):
        places = [f"--rootdir={tmp_path}", "-o", f"pythonpath={ROOT / 'tests/support'}"]
        printed = run_pytest(str(tmp_path), *places, "--collect-only", *options)
        return {line.split("::")[1] for line in printed.splitlines() if "::" in line}

    def named(most):
        return {f"{name}[{size}-{kind}]" for name, size in most.items() for kind in "ab"}

    alone = {"test_alone"}
    most = {"test_all": 4, "test_few": 2, "test_two": 2, "test_many": 4}
    assert chosen("--most-of", "4") == alone | named(most)
    assert chosen("--most-of", "4", "--world-sizes", "1,2") == alone | named(
        {"test_few": 2, "test_two": 2}
    )
    most = {"test_all": 2, "test_few": 2, "test_two": 2, "test_many": 2}
    assert chosen("--most-of", "2") == alone | named(most)
    # A test that has no size so small is kept, and skips itself.
    assert chosen("--most-of", "1") == alone | named(
        {"test_all": 1, "test_few": 1, "test_two": 2, "test_many": 2}
    ) | named({"test_many": 4})


def test_a_worker_of_xdist_has_gpus_of_its_own(tmp_path, monkeypatch):
    """Runs both conftest.py files on a fake machine of five GPUs."""
    folder = tmp_path / "tests" / "hardware"
    folder.mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests/support"), prepend=os.pathsep)
    made_up = "\nfrom kccl import gpu\ngpu.num_devices = lambda: 5\n"
    for place in ("tests", "tests/hardware"):
        conftest = (ROOT / place / "conftest.py").read_text()
        (tmp_path / place / "conftest.py").write_text(conftest + made_up)
    (folder / "test_it.py").write_text(
        "import os, pytest\n"
        "@pytest.mark.parametrize('world_size', [1, 2, 4] * 3)\n"
        "def test(world_size):\n"
        "    number = int(os.environ['PYTEST_XDIST_WORKER'].removeprefix('gw'))\n"
        "    assert os.environ['CUDA_VISIBLE_DEVICES'] == ['3,5', '7,11'][number]\n"
        "    assert os.environ['KCCL_CACHE'] == os.environ['THE_CACHE']\n"
    )
    monkeypatch.setenv("THE_CACHE", os.environ["KCCL_CACHE"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5,7,11,13")
    root = f"--rootdir={tmp_path}"
    side_by_side = ("-n", "2", "--dist", "loadgroup")
    sizes = ("--world-sizes", "1,2")
    assert "6 passed" in run_pytest(str(folder), root, *side_by_side, *sizes)
    # Started from tests/, pytest lacks the options of tests/hardware, but still divides the GPUs.
    assert "9 passed" in run_pytest(str(tmp_path / "tests"), root, *side_by_side)


# Steps


def test_a_step_that_outlives_its_limit_is_ended_with_all_that_it_started(tmp_path):
    output = tmp_path / "step.txt"
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    began = time.monotonic()
    command = [sys.executable, "-c", program]
    assert steps.execute_processes(command, 6, output) == steps.TIMED_OUT
    assert time.monotonic() - began < 20
    pid = int(output.read_text())
    # A killed orphan stays in the process table until its new parent reaps it.
    status = Path(f"/proc/{pid}/status")
    assert eventually(lambda: not status.exists() or "(zombie)" in status.read_text())


def test_a_driver_that_is_ended_ends_its_step(tmp_path):
    output = tmp_path / "step.txt"
    step = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from kccl.bench.gpu import steps as gpu_steps\n"
        "gpu_steps.heed_sigterm()\n"
        f"step = [sys.executable, '-c', {step!r}]\n"
        f"gpu_steps.execute_processes(step, 60, Path({str(output)!r}))\n"
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
    assert steps.execute_processes([sys.executable, "-c", program], 30, output) == 3
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
