"""Why a test may skip itself in `make test-all`.

There a package that pip installs is never missing, so a test that misses one fails. What pip
cannot give a machine is a reason: GPUs, cores, features of its kernel and CPU, and programs of its
system.
"""

import re

import pytest

ALLOWED = (
    r"no GPU|needs \d GPUs.*|there is a GPU",
    r"there is one core|this machine has one core|one core cannot have two pinned ranks",
    # The kernel and the CPU.
    r"memfd_secret.*|unshare .* is not possible here|the kernel does not count it",
    r"processes may not read each other's memory here|this CPU has no FMA",
    r".* working ThreadSanitizer.*",
    # Programs of the system.
    r"no C\+\+ compiler.*|no C compiler.*|(inductor|torch\.compile) needs g\+\+",
    r"no Spin 6.*|no qemu-aarch64.*|no make|there is no (cmake|nvcc|hipcc|Chromium|curl)",
    # It compiles for minutes, and runs the tests itself.
    r"`make wheel` builds the wheels",
    # No wheel has the headers of cooperative groups, and none has llama.cpp.
    r"no folder has cooperative_groups\.h.*|.*`make test-llama`.*",
)


def is_allowed(reason):
    """Whether the machine, and no missing package, is the reason."""
    return any(re.fullmatch(each, reason, re.DOTALL) for each in ALLOWED)


def fail_if_refused(report):
    """Makes a failure of a report of pytest's that a skip for another reason has made."""
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    path, line, told = report.longrepr
    reason = told.removeprefix("Skipped: ")
    if not is_allowed(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{path}:{line}: skipped: {reason}\n"
            "With --complete only the reasons in tests/support/skips.py skip a test."
        )


class Complete:
    """The plugin behind --complete."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        fail_if_refused(report)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self):
        report = yield
        fail_if_refused(report)
        return report
