"""Tests that need a GPU, on a machine without one: a line tells how many were left out, and why."""

import pytest


def leave_out(config, items, reason):
    """Deselects the tests, and has them told at the end."""
    config.hook.pytest_deselected(items=items)
    # A worker of pytest-xdist tells the process that shows the results.
    told = getattr(config, "workeroutput", None)
    if told is None:
        told = config.pluginmanager.get_plugin("without_gpu").told
    told["without_gpu"] = f"{len(items)} tests need a GPU: {reason}"


class WithoutGpu:
    """The plugin that prints the line, in the process that shows the results."""

    def __init__(self):
        self.told = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        # A worker that crashed has none.
        self.told |= getattr(node, "workeroutput", None) or {}

    def pytest_terminal_summary(self, terminalreporter):
        if "without_gpu" in self.told:
            terminalreporter.line(self.told["without_gpu"])
