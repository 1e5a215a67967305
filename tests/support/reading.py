"""Workers of pytest-xdist that read the files of tests from both ends.

pytest compiles a file of tests when it first reads it, and keeps the result beside the file. In a
new checkout that takes twice as long as all else that comes before the first test, and each worker
reads all files. So every second worker begins with the last file. From the middle on, each finds
what others have compiled.
"""

from itertools import groupby

import pytest


class FromTheEnd:
    """The plugin of every second worker. All workers must agree on the order of the tests."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        report = yield
        if isinstance(collector, pytest.Directory):
            report.result.reverse()
        return report

    # First: others choose and mark tests, and pytest sorts them by their fixtures.
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
        items[:] = [item for tests in reversed(files) for item in tests]


def begins_at_the_end(config):
    """Whether this process is such a worker. Named files or folders are read in the order of their
    names on the command line.
    """
    worker = getattr(config, "workerinput", {}).get("workerid", "gw0")
    is_second = int(worker.removeprefix("gw")) % 2 == 1
    return is_second and config.args_source is config.ArgsSource.TESTPATHS
