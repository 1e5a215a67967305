"""The estimates for MI300X stay where they are recorded."""

import json

import pytest
from device_compilers import has_zig
from estimate import RECORD, all_reduce, grid_sync
from gcn_machine import LATENCIES

from kccl import topology

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(20),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]


def _recorded(call, **of):
    (document,) = map(json.loads, RECORD.read_text().splitlines())
    (row,) = (
        each
        for each in document["rows"]
        if each["call"] == call and all(each[name] == value for name, value in of.items())
    )
    return row["time_us"]


@pytest.mark.parametrize("call", ["all_reduce_one_shot_ll16", "all_reduce_one_shot_sentinel"])
def test_an_all_reduce_of_8_ranks_takes_less_than_it_may(call):
    row = all_reduce(call, 8192, 8, 128)
    assert row.time_us <= 3
    recorded = _recorded(call, nbytes=8192, blocks=8, threads=128)
    assert row.time_us == pytest.approx(recorded, rel=0.05)


def test_a_barrier_of_256_compute_units_takes_less_than_it_may():
    """With blocks of one wave. With 8 waves it takes longer: see bench/LOG.md."""
    row = grid_sync("grid_sync relaxed", 256, 64)
    assert row.time_us <= 0.9
    recorded = _recorded("grid_sync relaxed", blocks=256, threads=64)
    assert row.time_us == pytest.approx(recorded, rel=0.05)


def test_counters_of_dies_gain_beside_the_flat_layout():
    machine = topology.recorded()["mi300x-8"]
    placed, flat = (
        grid_sync("grid_sync relaxed", 256, 64, topology.grid_counters(machine, layout)).time_us
        for layout in topology.LAYOUTS
    )
    assert placed <= 0.9 and flat > 1.5 * placed


def test_the_record_has_the_assumptions_of_now():
    (document,) = map(json.loads, RECORD.read_text().splitlines())
    now = {name: {"value": each.value, "source": each.source} for name, each in LATENCIES.items()}
    assert document["assumptions"] == now
