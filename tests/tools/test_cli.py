"""The command `kccl`."""

import argparse
import json
import pickle
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from long import long_after
from ranks import environment

from kccl import gpu, run_threads, topology
from kccl.base import abi
from kccl.base import errors as kccl_errors
from kccl.plan import specs
from kccl.tools import cli, warm

MPIRUN = Path(sys.executable).with_name("mpirun")


def kccl(*arguments, launcher=(), **variables):
    return subprocess.run(
        [*launcher, sys.executable, "-m", "kccl", *arguments],
        **{"env": environment(**variables), "stdin": subprocess.DEVNULL, "timeout": 100},
        **{"capture_output": True, "text": True},
    )


@pytest.fixture
def here(capsys, monkeypatch):
    """here(words, variables): as kccl(), but in this process: exit code, stdout and stderr."""

    def run(*arguments, **variables):
        with monkeypatch.context() as patch:
            for name, text in variables.items():
                patch.setenv(name, text)
            code = cli.main(arguments)
        return (code, *capsys.readouterr())

    return run


def test_doctor():
    done = kccl("doctor", "--json")
    assert done.returncode == 0
    assert done.stderr.startswith(" check")
    document = json.loads(done.stdout)
    assert document["is_well"]
    checks = {check["name"]: check for check in document["checks"]}
    assert checks["2 ranks"]["status"] == "ok"
    for check in checks.values():
        assert check["found"]
        assert (check["status"] == "ok") == (not check["reason"] and not check["cure"])
    assert "cuda backend needs" in checks["CUDA"]["reason"]
    assert checks["simulator"]["status"] == "ok"
    assert document["variables"]["KCCL_TIMEOUT"] == {"value": "20", "is_set": True}


def test_doctor_shows_what_fails():
    done = kccl("doctor", "--json", KCCL_TIMEOT="5")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    failed = {check["name"] for check in document["checks"] if check["status"] == "no"}
    assert {"variables", "1 rank", "2 ranks"} <= failed
    assert "KCCL_TIMEOT is unknown, must" in done.stderr
    assert document["variables"]["KCCL_TIMEOT"] == {"value": "5", "is_set": True}


def test_topo():
    done = kccl("topo", "--json")
    assert done.returncode == 0
    machine = json.loads(done.stdout)
    assert machine["format"] == topology.FORMAT
    assert machine["core_to_core_us"] is None
    assert "CPU model" in done.stderr


def test_topo_places_ranks():
    shown = kccl("topo", "-n", "64").stdout
    assert "64 ranks, layout 'topology'" in shown and "group 8-15 on any CPU; rank 8" in shown


def test_topo_probes_some_cpus():
    done = kccl("topo", "--probe", "--cpus", "2", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["core_to_core_us"]
    assert sum(us is not None for row in rows for us in row) == 2


@pytest.mark.long
def test_topo_plot_probes(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "distances.svg"
    done = kccl("topo", "--json", "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["core_to_core_us"][0][1] > 0
    assert picture.read_text().startswith("<?xml")
    # Told before anything is measured.
    for path, told in (
        ("nowhere/distances.svg", "No such file or directory"),
        ("distances.foo", "its suffix is '.foo', must be one of ."),
        ("distances", "its suffix is '', must be one of "),
        ("", "its suffix is '', must be one of "),
    ):
        done = kccl("topo", "--plot", str(tmp_path / path))
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"kccl: cannot write {tmp_path / path}: {told}")
    assert [path.name for path in tmp_path.iterdir()] == ["distances.svg"]


@pytest.mark.parametrize("word", ["--nope", "all_reduce", "--backend=nope"])
def test_complaints_of_bench_decode_name_its_own_help(word, capsys):
    assert cli.main(["bench", "decode", word]) == 2
    assert capsys.readouterr().err.rstrip().endswith("; see `kccl bench decode --help`")


def test_plan(here):
    done = kccl("plan", "all_reduce", "--bytes", "8", "-n", "4")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("all_reduce of 8 bytes float32 over 4 ranks on host\n")
    _, out, _ = here(
        "plan", "all_reduce", "--bytes", "8K", KCCL_ALGORITHM="all_reduce_two_shot_pull_simple"
    )
    assert "  all_reduce_two_shot_pull_simple: KCCL_ALGORITHM prefers it" in out
    assert here("plan", "barrier")[1].startswith("barrier of 0 bytes over 2 ranks")
    code, _, err = here("plan", "barrier", "--bytes", "8")
    assert code == 2 and "a barrier has no message" in err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [(["benc"], "bench"), (["plan", "all_reduce", "--backend", "hots"], "host")],
)
def test_a_word_that_is_nearly_right_names_the_right_one(arguments, meant):
    done = kccl(*arguments)
    assert done.returncode == 2 and f"). Did you mean {meant}?; see" in done.stderr


def test_warm_takes_the_names_of_element_types_that_bench_takes():
    parser = argparse.ArgumentParser()
    warm.add_arguments(parser)
    assert parser.parse_args(["-n", "2", "-d", "fp32", "half"]).d == ["float32", "float16"]
    assert parser.parse_args(["-n", "2"]).d == warm.ELEMENT_TYPES


@pytest.mark.parametrize("backend", ["host", "cuda", "sim"])
def test_plan_says_what_the_library_does(here, backend):
    plan = ("plan", "all_reduce", "--bytes", "8K", "--dtype", "bfloat16", "--backend", backend)
    # The last one cannot run on GPUs: the library then takes what its table says.
    for preferred in ("", "all_reduce_one_shot_ll16", "all_reduce_two_shot_cma_simple"):
        code, out, err = here(*plan, KCCL_ALGORITHM=preferred)
        assert (code, err) == (0, "")
        first, choice = out.splitlines()[:2]
        assert first == f"all_reduce of 8192 bytes bfloat16 over 2 ranks on {backend}"
        is_able = preferred and (backend == "host" or "cma" not in preferred)
        # The simulator measures nothing, so it has no table.
        by_table = "by specs.py" if backend == "sim" else f"by {backend}.json"
        assert ("KCCL_ALGORITHM prefers it" in choice) == bool(is_able)
        assert (by_table in choice) == (not is_able)
        assert ("nothing is measured" in choice) == (backend == "sim" and not is_able)
    if backend == "sim":

        def main(comm):
            return comm.plan("all_reduce", 8192, "bfloat16").explain()

        assert run_threads(main, 2, backend="sim")[0] + "\n" == here(*plan)[1]


@pytest.mark.long
def test_warm(tmp_path):
    pytest.importorskip("cuda.bindings.nvrtc")
    wanted = ("-n", "2", "-d", "bfloat16", "--op", "sum", "--arch", "sm_90a")
    for _ in range(2):
        done = kccl("warm", *wanted, KCCL_CACHE=str(tmp_path))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"33 kernels for sm_90a in {tmp_path}\n")
        assert len(list(tmp_path.glob("*/*.cubin"))) == 33
    # A call then finds its kernel in the cache.
    (found,) = warm.warm([("all_reduce_one_shot_ll16", "bfloat16", "sum", 2)], "sm_90a")
    assert (tmp_path / found.parent.name / found.name).exists()
    for arch, must in (("sm_33", "must be one of sm_"), ("sm_90", "must be 'sm_90a': ")):
        done = kccl("warm", "-n", "2", "-d", "int32", "--op", "sum", "--arch", arch)
        assert done.returncode == 2
        assert done.stderr.startswith(f"kccl: arch is {arch!r}, {must}")


def test_errors_can_be_pickled():
    error = pickle.loads(pickle.dumps(gpu.DriverError("cuGraphLaunch failed", 719)))
    assert (type(error), str(error), error.code) == (
        gpu.DriverError,
        "cuGraphLaunch failed",
        719,
    )
    error = pickle.loads(pickle.dumps(kccl_errors.CompileError("no", log="line 3")))
    assert (str(error), error.log) == ("no", "line 3")


_OF_SUMS = "scan_", "scale", "narrow", "rms_norm"


def test_warm_knows_what_gpus_take():
    alone, four = warm.instances([1]), warm.instances([4])
    names = {name for name, *_ in four}
    assert {"put", "get", "signal", "wait", "barrier_direct"} < names
    assert {"all_to_all_parts", "reduce_scatter_parts"} < names
    assert {spec.name for spec in specs.SPECS} - names == {
        name for name in abi.KERNELS if name.endswith(("_pull_simple", "_cma_simple"))
    }
    assert not any("two_shot" in name or "push" in name for name, *_ in alone)
    assert ("all_reduce_one_shot_ll16", "int32", "avg", 4) not in four
    # Kernels that move bytes have one instance for all types.
    assert len([each for each in four if each[0] == "all_gather_direct_ll16"]) == 1
    without_op = {name for name, *_ in warm.instances([4], ["int32"], ["avg"])}
    assert without_op == {
        name for name in names if "reduce" not in name and not name.startswith(_OF_SUMS)
    }
    # What premul_sum() needs besides a sum, of each type that it takes.
    products = warm.instances([2], ["bfloat16", "float64"], ["sum"])
    assert [each[:2] for each in products if each[0] == "scale"] == [
        ("scale", "bfloat16"),
        ("scale", "float64"),
    ]
    assert [each[:2] for each in products if each[0] == "narrow"] == [("narrow", "bfloat16")]
    assert len(warm.instances([1, 4, 4])) < len(alone) + len(four)


def test_bench_alone():
    done = kccl("bench", "all_reduce", "-b", "8", "-e", "16", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["wrong"] for row in json.loads(done.stdout)["rows"]} == {0}
    assert done.stderr.startswith("# kccl bench all_reduce: 1 rank")


def test_bench_simulated():
    arguments = ("--backend", "sim", "-n", "3", "-e", "16", "--seed", "2", "--json")
    done = kccl("bench", "all_reduce", *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(
        "# kccl bench all_reduce: 3 ranks, backend sim, float32 sum, in place\n"
    )
    assert "# times are those of the simulation on this CPU, not of any GPU" in done.stderr
    assert "# floor:" not in done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["bytes"] for row in rows} == {8, 16}
    assert all(row["wrong"] == 0 and row["time_us"] > 0 for row in rows)
    assert all(row[name] is None for row in rows for name in ("floor_us", "busbw_gbps"))


def test_version_and_folders():
    import kccl as package

    assert kccl("--version").stdout == f"kccl {package.__version__}\n"
    folder = Path(kccl("include-dir").stdout.strip())
    assert (folder / "kccl" / "kccl.cuh").exists()
    assert (Path(kccl("cmake-dir").stdout.strip()) / "kcclConfig.cmake").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("bench",),
        ("bench", "nonsense"),
        ("bench", "all_reduce", "-d", "float7"),
        ("bench", "all_reduce", "-b", "x"),
        ("bench", "all_reduce", "-n", "2"),
        ("bench", "all_reduce", "--backend", "sim", "-n", "9"),
        ("plan", "nonsense"),
        ("plan", "all_reduce", "--bytes", "6"),
        ("plan", "all_reduce", "--bytes", "x"),
        ("plan", "all_reduce", "--dtype", "float7"),
        ("plan", "all_reduce", "-n", "65"),
        ("topo", "-n", "65"),
        ("plan", "all_reduce", "--backend", "rocm"),
        ("warm", "-n", "9"),
        ("warm", "-n", "2", "--op", "median"),
        ("warm", "-n", "2", "-d", "int7"),
        ("run", "--", "true"),
        ("run", "-n", "2"),
        ("run", "-n", "0", "--", "true"),
        ("run", "-n", "2", "--timeout", "0", "--", "true"),
        ("topo", "--nonsense"),
        ("topo", "--probe", "--cpus", "1"),
        ("doctor", "nonsense"),
    ],
    ids=" ".join,
)
def test_wrong_arguments_give_one_line(here, arguments):
    code, out, err = here(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("kccl") and err.count("\n") == 1


def test_wrong_variables_give_one_line(here):
    for variables in ({"KCCL_EPOCH_BITS": "x"}, {"KCCL_TIMEOT": "1"}, {"PMI_RANK": "x"}):
        code, _, err = here("plan", "barrier", **variables)
        assert code == 2
        assert err.startswith("kccl: ") and err.count("\n") == 1


def test_a_reader_that_leaves_is_no_error():
    command = f"{shlex.quote(sys.executable)} -m kccl topo | true"
    done = subprocess.run(
        ["sh", "-c", command], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


@pytest.mark.parametrize(("name", "code"), [("plan", 0), ("doctor", 0), ("generate", 141)])
def test_a_pipe_that_breaks_is_no_error_of_tables_only(name, code):
    """As when `run` writes to a process of its own that has ended."""
    program = f"""
from kccl.tools import cli
def breaks(args): raise BrokenPipeError
run = cli._COMMANDS["{name}"].run
cli._COMMANDS["{name}"] = cli.Command("", lambda parser: None, breaks)
cli._OF_TABLES = tuple(breaks if each is run else each for each in cli._OF_TABLES)
raise SystemExit(cli.main(["{name}"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


def test_decode_is_the_word_after_bench():
    find = lambda *words: cli._parser(words).parse_args(words).entry.run  # noqa: E731
    assert find("bench", "decode", "--json") is cli._bench_decode
    assert find("bench", "all_reduce", "--csv", "decode") is cli._bench
    assert find("bench", "--csv", "decode", "all_reduce") is cli._bench


def test_a_json_parser_may_read_the_pipe():
    """The tables come by stderr, so they are in the way of no `| jq`."""
    python = shlex.quote(sys.executable)
    reader = f"{python} -c 'import json, sys; print(len(json.load(sys.stdin)[\"rows\"]))'"
    command = f"{python} -m kccl bench barrier --json --verbose | {reader}"
    done = subprocess.run(
        ["sh", "-c", command], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "3"
    assert done.stderr.startswith("# kccl bench barrier: 1 rank")


def test_start_is_cheap():
    program = (
        "import sys; from kccl.tools import cli; cli.main(['--version']); "
        "print([name for name in ('numpy', 'rich', 'mpi4py', 'kccl._core') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]"


# Commands, and what their output begins with.
FIRST = {
    "topo": "Machine",
    "doctor": " check",
    "plan barrier": "barrier of 0 bytes over 2 ranks on host",
    "--version": "kccl ",
    "include-dir": "/",
    "cmake-dir": "/",
    "bench barrier": "# kccl bench barrier: 2 ranks, backend host",
}


@pytest.mark.parametrize("way", long_after(1, ["kccl run", "mpirun"]))
def test_under_a_launcher_rank_0_prints(way):
    """One job makes the commands after each other; `bench`, the last one, has ranks that meet."""
    if way == "mpirun":
        if not MPIRUN.exists():
            pytest.skip("no mpirun beside this Python")
        launcher = [str(MPIRUN), "-n", "2"]
    else:
        launcher = [sys.executable, "-m", "kccl", "run", "-n", "2", "--"]
    program = f"""
import sys
from kccl.tools import cli
sys.exit(any([cli.main(command.split()) for command in {list(FIRST)}]))
"""
    done = subprocess.run(
        [*launcher, sys.executable, "-c", program],
        # One rank waits in the bench while the other one is the doctor.
        **{"env": environment(KCCL_FIRST_TIMEOUT="60"), "stdin": subprocess.DEVNULL},
        **{"capture_output": True, "text": True, "timeout": 100},
    )
    assert (done.returncode, done.stderr) == (0, "")
    for first in FIRST.values():
        lines = [line for line in done.stdout.splitlines() if line.startswith(first)]
        assert len(lines) == list(FIRST.values()).count(first), (first, done.stdout)


def test_run_under_mpirun_is_refused():
    if not MPIRUN.exists():
        pytest.skip("no mpirun beside this Python")
    done = kccl("run", "-n", "2", "--", "true", launcher=[str(MPIRUN), "-n", "2"])
    assert done.returncode == 2
    assert done.stderr.count("kccl run starts the ranks itself") == 1
