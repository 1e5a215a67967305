"""What an engine measures about itself."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from kccl.engine.executors.measuring import Measuring

BYTES = 1_000_000


class Rank:
    """Reads weights in a time that is told."""

    def __init__(self, fixed_s, each_s):
        self.fixed_s, self.each_s = fixed_s, each_s
        self.turns = []

    def start_streaming(self, turns):
        self.turns.append(turns)

    def wait(self):
        return self.fixed_s + self.turns[-1] * self.each_s


@contextmanager
def request(_):
    yield


@pytest.mark.parametrize(
    ("fixed_s", "each_s"),
    [(0, 1e-6), (1e-3, 250e-6), (50e-3, 250e-6), (1e-3, 15e-3)],
)
def test_what_a_request_costs_besides_is_no_reading(fixed_s, each_s):
    rank = Rank(fixed_s, each_s)
    ranks = SimpleNamespace(mine=[rank], request=request, all_gather=lambda value: [value])
    runner = SimpleNamespace(ranks=ranks, program=SimpleNamespace(streamed_bytes=lambda: BYTES))
    measuring = Measuring()
    measuring._runner, measuring._ranks = runner, ranks
    found = measuring.bandwidth()
    longest = max(rank.turns)
    if longest > 1:
        assert found == pytest.approx(BYTES / each_s)
        assert 0.01 < (longest - 1) * each_s < 0.03
    else:
        # A request of one reading takes so long already that a longer one would only take time.
        assert found == pytest.approx(BYTES / (fixed_s + each_s))
