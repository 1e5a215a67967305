"""What other programs take of the CPUs while a bench runs. Ranks and clocks are made up."""

import os
from types import SimpleNamespace

import pytest

from kccl.bench.harness import others

# user, nice, system, idle, iowait, irq, softirq, steal
STAT = """cpu  1 1 1 1 1 1 1 1 0 0
cpu0 {0} 0 0 5 5 0 900 0 0 0
cpu1 0 0 {1} 5 5 0 0 0 0 0
cpu10 {2} 0 0 5 5 0 0 0 0 0
intr 1 2 3
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Two ranks on CPUs 0 and 1. spend(seconds of each CPU, seconds of each rank) passes 2 s."""
    now = SimpleNamespace(time=5.0, cpus=[0.0] * 3, ranks=[0.0, 0.0])
    path = tmp_path / "stat"
    tick = os.sysconf("SC_CLK_TCK")

    def spend(cpus, ranks):
        now.time += 2
        now.cpus = [old + new for old, new in zip(now.cpus, cpus, strict=True)]
        now.ranks = [old + new for old, new in zip(now.ranks, ranks, strict=True)]
        path.write_text(STAT.format(*(round(each * tick) for each in now.cpus)))

    def gather(given):
        return [[0], [1]] if isinstance(given, list) else now.ranks

    spend((7, 8, 9), (3, 4))
    monkeypatch.setattr(others, "_STAT", path)
    monkeypatch.setattr(others.time, "perf_counter", lambda: now.time)
    return SimpleNamespace(spend=spend, gather=gather)


@pytest.mark.parametrize(
    ("cpus", "ranks", "share"),
    [
        ((2, 2, 0), (2, 2), 0),
        # Other CPUs' load is none of the ranks'.
        ((2, 2, 2), (1.5, 2.5), 0),
        ((2, 2, 0), (1.5, 1.5), 0.25),
        ((1, 0, 0), (0, 0), 0.25),
        # The ranks' own interrupts count as theirs on some kernels.
        ((1.5, 1.5, 0), (2, 2), 0),
    ],
)
def test_what_the_ranks_have_not_used_is_the_others(machine, cpus, ranks, share):
    found = others.Others(machine.gather)
    machine.spend(cpus, ranks)
    assert found.share() == pytest.approx(share)
