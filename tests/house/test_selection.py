"""Which tests `make test` and `make test-all` run, and what may skip a test."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest
from budget import drawn
from limits import Limits
from long import long_after, long_beyond_each
from skips import is_allowed
from slowest import Slowest
from source_tree import ROOT

MAKEFILE = (ROOT / "Makefile").read_text()
TESTS = """
import pytest

def test_short():
    pass

@pytest.mark.long
def test_long():
    pass

def test_misses_a_package():
    pytest.importorskip("no_such_package", reason="no_such_package is not installed")

def test_misses_a_gpu():
    pytest.skip("no GPU")
"""
# The first fails beside others, the second each time.
UNSURE = """
import os
from pathlib import Path

TRIES = Path(os.environ["TRIES"])

def test_fails_once():
    TRIES.write_text(TRIES.read_text() + "x")
    assert TRIES.read_text() != "x"

def test_fails():
    assert "fails" not in os.environ
"""
HANGS = """
import subprocess
import sys
import time

import pytest

RANK = \"""
import time

def in_a_rank():
    time.sleep(600)

in_a_rank()
\"""

@pytest.mark.timeout(2)
def test_hangs():
    subprocess.run([sys.executable, "-c", RANK])

def test_goes_on():
    pass
"""


@pytest.fixture
def told(tmp_path):
    """told(*arguments): what pytest says about TESTS with the options of this checkout."""
    folder = tmp_path / "tests"
    folder.mkdir()
    conftest = (ROOT / "tests/conftest.py").read_text()
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_some.py").write_text(TESTS)
    settings = (ROOT / "pyproject.toml").read_text()
    settings = settings.replace('"tests/support"', f'"{ROOT}/tests/support"')
    (tmp_path / "pyproject.toml").write_text(settings)

    def run(*arguments, **variables):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | variables, capture_output=True, text=True
        )
        return f"{done.stdout}\nexit code {done.returncode}"

    return run


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        ([], ["test_short"]),
        (["tests/test_some.py"], ["test_short", "test_long"]),
    ],
    ids=str,
)
def test_long_tests_run_where_a_file_is_named(arguments, passed, told):
    assert re.findall(r"::(\w+) PASSED", told(*arguments)) == passed


def test_a_missing_package_fails_where_tests_must_be_complete(told):
    assert re.findall(r"::(\w+) SKIPPED", told()) == ["test_misses_a_package", "test_misses_a_gpu"]
    complete = told("--complete")
    assert re.findall(r"::(\w+) FAILED", complete) == ["test_misses_a_package"]
    assert "skipped: no_such_package is not installed" in complete
    assert re.findall(r"::(\w+) SKIPPED", complete) == ["test_misses_a_gpu"]


@pytest.mark.long
def test_a_file_that_misses_a_package_fails_too(told, tmp_path):
    (tmp_path / "tests/test_some.py").write_text(
        'import pytest\npytest.importorskip("no_such_package", reason="it is not installed")\n'
    )
    assert "1 skipped" in told()
    assert "ERROR tests/test_some.py" in told("--complete")


@pytest.mark.long
def test_a_mark_that_nobody_knows_is_an_error(told, tmp_path):
    (tmp_path / "tests/test_some.py").write_text(
        "import pytest\n\n@pytest.mark.lnog\ndef test_some():\n    pass\n"
    )
    assert "'lnog' not found in `markers`" in told()


@pytest.mark.parametrize(
    "reason",
    [
        "PyTorch is not installed",
        "could not import 'transformers': No module named 'transformers'",
        "the ziglang wheel is not installed",
        "pip cannot fetch llama-cpp-python==0.3.36: no GPU",
        "no mpirun beside this Python",
    ],
)
def test_a_missing_package_is_no_reason(reason):
    assert not is_allowed(reason)


def test_what_is_not_long_has_each_value_of_each_axis():
    of_all = long_beyond_each("abc", range(2))
    assert [each.values for each in of_all] == [(a, b) for a in "abc" for b in range(2)]
    short = [each.values for each in of_all if not each.marks]
    assert short == [("a", 0), ("b", 1), ("c", 0)]


def test_each_unit_is_as_likely_at_each_place():
    """Over 1,000 seeds each of ten units stands 100 times at each place, give or take 9.5."""
    units = range(10)
    places = Counter(
        (at, unit) for seed in range(1000) for at, unit in enumerate(drawn(units, seed))
    )
    assert len(places) == 100
    assert all(60 < count < 140 for count in places.values())
    assert drawn(units, "3f2a") == drawn(units, "3f2a") != drawn(units, "3f2b")


@pytest.mark.parametrize("workers", long_after(0, [["-n", "2", "--dist", "loadgroup"], []]))
def test_no_test_begins_when_time_is_up(workers, told, tmp_path):
    """What was not begun is deselected, and the seed gives the order."""
    test = "@pytest.mark.long\ndef test_{}():\n    pass\n"
    text = "import pytest\n" + "".join(test.format(k) for k in range(30))
    (tmp_path / "tests/test_some.py").write_text(text)
    later = ["--until", str(time.time() + 60), "--seed", "ab"]
    workers = [*workers, "-m", "long"]
    shown = told(*workers, *later)
    assert "order of the tests: seed ab" in shown
    assert "30 of 30 tests ran, seed ab" in shown
    if "-n" not in workers:
        order = re.findall(r"::test_(\d+) PASSED", shown)
        assert order != sorted(order, key=int)
    shown = told(*workers, "--until", str(time.time() - 1))
    assert "0 of 30 tests ran" in shown
    assert "30 deselected" in shown
    assert "exit code 0" in shown


def test_two_workers_read_files_from_both_ends(told, tmp_path):
    """Yet they agree on the order, or else pytest-xdist ends with an error."""
    read = tmp_path / "read"
    text = (
        f"import os\n\nwith open({str(read)!r}, 'a') as file:\n"
        "    print(os.environ['PYTEST_XDIST_WORKER'], __name__, file=file)\n\n"
        "def test_a():\n    pass\n\ndef test_b():\n    pass\n"
    )
    (tmp_path / "tests/more").mkdir()
    for name in ("test_some", "more/test_first", "more/test_last"):
        (tmp_path / f"tests/{name}.py").write_text(text)
    assert "6 passed" in told("-n", "2", "--dist", "loadgroup")
    lines = [line.split() for line in read.read_text().splitlines()]
    orders = {worker: [name for each, name in lines if each == worker] for worker in ("gw0", "gw1")}
    assert orders["gw0"] == ["test_first", "test_last", "test_some"] == orders["gw1"][::-1]


@pytest.mark.parametrize("workers", long_after(0, [[], ["-n", "1", "--dist", "loadgroup"]]))
def test_what_failed_runs_again_alone(workers, told, tmp_path):
    (tmp_path / "tests/test_some.py").write_text(UNSURE)
    tries = tmp_path / "tries"

    def shown(*arguments, **variables):
        tries.write_text("")
        return told(*workers, *arguments, TRIES=str(tries), **variables)

    once = shown("--again")
    assert (
        "failed beside other tests, and passed alone: tests/test_some.py::test_fails_once" in once
    )
    assert "exit code 0" in once
    assert "1 passed, 1 failed once" in once.replace(
        "1 failed once, 1 passed", "1 passed, 1 failed once"
    )
    twice = shown("--again", fails="1")
    assert "a test failed twice" in twice
    assert "exit code 1" in twice
    assert "exit code 1" in shown()


@pytest.mark.parametrize("workers", long_after(0, [[], ["-n", "1", "--dist", "loadgroup"]]))
def test_a_test_that_hangs_shows_the_stacks_and_ends_what_it_started(workers, told, tmp_path):
    (tmp_path / "tests/test_some.py").write_text(HANGS)
    shown = told(*workers)
    assert "not at its end after 2 s" in shown
    assert "in test_hangs" in shown
    assert "in_a_rank" in shown
    assert "1 failed, 1 passed" in shown


@pytest.mark.parametrize("apart", [{}, {"fixtures_apart": True}])
def test_a_limit_covers_fixtures_unless_they_are_apart(apart):
    added = []
    takes = pytest.mark.takes(20, **apart).mark
    item = SimpleNamespace(get_closest_marker=lambda _: takes, add_marker=added.append)
    Limits().pytest_collection_modifyitems([item])
    assert added == [pytest.mark.timeout(100, func_only=bool(apart))]


def test_a_run_ends_with_its_folders_and_its_slowest_files():
    ended, lines = Slowest(), []
    for nodeid, seconds in (
        ("sim/test_a.py", 2),
        ("engine/model/test_b.py", 4),
        ("sim/test_c.py", 3),
    ):
        ended.pytest_runtest_logreport(
            SimpleNamespace(nodeid=f"tests/{nodeid}::test_some", duration=seconds)
        )
    ended.pytest_terminal_summary(SimpleNamespace(line=lines.append))
    assert lines[0] == "seconds by folder, on all workers: sim 5, engine 4"
    assert [line.split()[-1] for line in lines[2:]] == [
        *("tests/engine/model/test_b.py", "tests/sim/test_c.py", "tests/sim/test_a.py")
    ]


def test_the_garbage_collector_is_off_while_tests_are_collected_only(told, tmp_path):
    (tmp_path / "tests/test_some.py").write_text(
        "import gc\n\nWAS_ON = gc.isenabled()\n\n"
        "def test_some():\n    assert gc.isenabled() and not WAS_ON\n"
    )
    assert "1 passed" in told()


def test_signals_work_though_who_started_the_tests_ignores_them(told, tmp_path):
    (tmp_path / "tests/test_some.py").write_text(
        "import signal\n\ndef test_some():\n"
        "    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
        "    assert signal.getsignal(signal.SIGQUIT) == signal.SIG_DFL\n"
    )
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGQUIT)}
    try:
        assert "1 passed" in told("-n", "1")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_continuous_integration_runs_both_halves_once():
    """test-all installs PyTorch first, needs nothing that `make test` leaves behind, and ends."""
    commands = re.findall(r"^step make (\S+)(.*)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    found = [name for name, _ in commands if name.startswith("test")]
    assert found == ["test", "test-all"]
    assert "BUDGET_S" in dict(commands)["test-all"]
    recipes = dict(re.findall(r"^(test|test-all|fetch): (.*\n(?:\t.*\n)+)", MAKEFILE, re.MULTILINE))
    assert '-m "not long and not mutation"' in recipes["test"]
    assert '-m "long and not mutation" --complete' in recipes["test-all"]
    assert recipes["test-all"].startswith("fetch\n")
    assert recipes["fetch"].startswith("setup $(VENV)/.parity\n")
