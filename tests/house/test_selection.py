"""Which tests `make test` and `make test-all` run, and what may skip a test."""

import re
import subprocess
import sys

import pytest
from long import long_beyond_each
from skips import is_allowed
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

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout

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


def test_continuous_integration_runs_both_halves_once():
    """test-all installs PyTorch first, and needs nothing that `make test` leaves behind."""
    commands = re.findall(r"^make (\S+)", (ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert [name for name in commands if name.startswith("test")] == ["test", "test-all"]
    recipes = dict(re.findall(r"^(test|test-all): (.*\n(?:\t.*\n)+)", MAKEFILE, re.MULTILINE))
    assert '-m "not long"' in recipes["test"]
    assert "-m long --complete" in recipes["test-all"]
    assert recipes["test-all"].startswith("setup $(VENV)/.parity\n")
