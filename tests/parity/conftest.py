"""The engine against other people's implementations. `make test-parity` runs these tests and prints
how far apart the logits are; `make test` does not collect them.
"""

import numpy as np
import pytest

ROWS = pytest.StashKey[list]()


def pytest_configure(config):
    config.stash[ROWS] = []


@pytest.fixture
def assert_close(request):
    """assert_close(found, wanted, tolerance): logits differ by at most the tolerance times their
    root mean square. The difference is listed at the end.
    """

    def check(found, wanted, tolerance):
        error = float(np.abs(found - wanted).max())
        size = float(np.sqrt(np.square(wanted).mean()))
        request.config.stash[ROWS].append((request.node.name, error, size))
        assert found.shape == wanted.shape
        # Neither vanishing nor so large that a softmax has one winner.
        assert 0.3 < size < 30
        assert error <= tolerance * size

    return check


def pytest_terminal_summary(terminalreporter, config):
    if config.stash[ROWS]:
        terminalreporter.section("largest difference of logits, and their root mean square")
    for name, error, size in config.stash[ROWS]:
        terminalreporter.write_line(f"{error:.1e} of {size:.2f}  {name}")
