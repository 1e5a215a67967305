"""Tests that failed run again, alone."""

import re
import subprocess
import sys

import pytest

# More than these do not fail by chance.
MOST = 8


def add_options(parser):
    parser.addoption(
        "--again",
        action="store_true",
        help=f"up to {MOST} tests that fail run again, alone, at the end; a second failure counts",
    )


class Again:
    """The plugin behind --again, in the process that shows the results."""

    def __init__(self):
        self._failed = {}
        self._are_tests = True
        self._told = ""

    def pytest_collectreport(self, report):
        self._are_tests &= not report.failed

    def pytest_runtest_logreport(self, report):
        if report.failed:
            # Without the group that pytest-xdist appends.
            nodeid = re.sub(r"@[^\]]*$", "", report.nodeid)
            self._failed.setdefault(nodeid, []).append(report)

    # Before the summary, which prints what this leaves.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if exitstatus != pytest.ExitCode.TESTS_FAILED or not self._are_tests:
            return
        if len(self._failed) > MOST:
            self._told = f"{len(self._failed)} tests failed, too many to run them again"
            return
        shown = session.config.get_terminal_writer()
        shown.line()
        shown.sep("=", "what failed runs again, alone")
        shown.flush()
        options = ["--complete"] if session.config.option.complete else []
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        if subprocess.run([*command, *self._failed], cwd=session.config.rootpath).returncode != 0:
            self._told = "a test failed twice"
            return
        session.exitstatus = pytest.ExitCode.OK
        self._told = "failed beside other tests, and passed alone: " + ", ".join(self._failed)
        stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
        for name in ("failed", "error"):
            stats["failed once"] = stats.get("failed once", []) + stats.pop(name, [])

    def pytest_terminal_summary(self, terminalreporter):
        if self._told:
            terminalreporter.line(self._told)
