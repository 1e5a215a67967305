"""The long tests that a given time has room for.

With --until no test begins after that time. With --seed the tests run in an order that it gives, so
another tree runs others of them. What was not begun is deselected, not skipped.
"""

import random
import time
from types import SimpleNamespace

import pytest


def units_of(items):
    """Lists of tests that one worker must run, in the order of their first tests: those of a group
    of pytest-xdist, or one test without a group.
    """
    units = {}
    for item in items:
        group = item.get_closest_marker("xdist_group")
        units.setdefault(f"@{group.args[0]}" if group else item.nodeid, []).append(item)
    return list(units.values())


def drawn(units, seed):
    """The units in the order that a seed gives. Each place is as likely as another for each unit.

    Large units do not come first: a change that breaks them would be found each time, and one that
    breaks small ones never.
    """
    order = list(units)
    random.Random(seed).shuffle(order)
    return order


def add_options(parser):
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="begin no test after this time, in seconds since 1970",
    )
    parser.addoption("--seed", help="run the tests in an order that this text gives")


class Budget:
    """The plugin behind --until and --seed. Workers of pytest-xdist have one each, which draws and
    ends; that of the process that shows the results counts.
    """

    def __init__(self, seed, until):
        self._seed = seed
        self._until = until
        self._found = []
        self._begun = set()

    def pytest_report_header(self):
        return f"order of the tests: seed {self._seed}" if self._seed else None

    # Behind those that choose tests, and pytest's own that sorts them by their fixtures.
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if self._seed:
            items[:] = [item for unit in drawn(units_of(items), self._seed) for item in unit]
        self._found = [item.nodeid for item in items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self._found = ids

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self):
        """Passes over a test when time is up: nothing is reported of it."""
        return True if self._until is not None and time.time() >= self._until else None

    def pytest_runtest_logreport(self, report):
        self._begun.add(report.nodeid)

    # Before the line that counts what was deselected.
    def pytest_sessionfinish(self, session):
        if not hasattr(session.config, "workerinput"):
            # Where pytest-xdist runs them, this process has no items.
            left = [SimpleNamespace(nodeid=each) for each in self._found if each not in self._begun]
            session.config.hook.pytest_deselected(items=left)

    def pytest_terminal_summary(self, terminalreporter):
        told = f"{len(self._begun):,} of {len(self._found):,} tests ran"
        terminalreporter.line(f"{told}, seed {self._seed}" if self._seed else told)
