"""The engine against other people's implementations. `make test-parity` and `make test-all` run
these tests, and print how far apart the logits are.
"""

from importlib.util import find_spec

import numpy as np
import pytest

LOGITS = "logits"


def pytest_ignore_collect(collection_path, config):
    """Without PyTorch and transformers most of these files cannot be imported."""
    if collection_path.stem.startswith("test_llama_cpp") or config.option.complete:
        return None
    return None if find_spec("torch") and find_spec("transformers") else True


@pytest.fixture
def assert_close(request):
    """assert_close(found, wanted, tolerance): logits differ by at most the tolerance times their
    root mean square. The difference is listed at the end.
    """

    def check(found, wanted, tolerance):
        error = float(np.abs(found - wanted).max())
        size = float(np.sqrt(np.square(wanted).mean()))
        # A worker of pytest-xdist hands it to the process that prints.
        request.node.user_properties.append((LOGITS, (request.node.name, error, size)))
        assert found.shape == wanted.shape
        # Neither vanishing nor so large that a softmax has one winner.
        assert 0.3 < size < 30
        assert error <= tolerance * size

    return check


def pytest_terminal_summary(terminalreporter):
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    properties = [each for report in reports for each in report.user_properties]
    rows = [row for name, row in properties if name == LOGITS]
    if rows:
        terminalreporter.section("largest difference of logits, and their root mean square")
    for name, error, size in rows:
        terminalreporter.write_line(f"{error:.1e} of {size:.2f}  {name}")
