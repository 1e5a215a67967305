"""What each folder of tests took, and which files took most, at the end of a run."""

from collections import Counter

SHOWN = 10


class Slowest:
    """Adds up what the tests of each file took."""

    def __init__(self):
        self._seconds = Counter()

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter):
        total = sum(self._seconds.values())
        if total < 1:
            return
        folders = Counter()
        for path, seconds in self._seconds.items():
            folders[path.removeprefix("tests/").partition("/")[0]] += seconds
        told = ", ".join(f"{name} {seconds:.0f}" for name, seconds in folders.most_common())
        terminalreporter.line(f"seconds by folder, on all workers: {told}")
        terminalreporter.line(f"{total:,.0f} s of tests, on all workers. The slowest files:")
        for path, seconds in self._seconds.most_common(SHOWN):
            terminalreporter.line(f"  {seconds:6.1f} s  {path}")
