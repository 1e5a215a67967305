"""`kccl topo --probe` on real GPUs: what it finds is whole, plausible and the same twice."""

import time
from dataclasses import replace

import pytest
from gpu_vendor import BACKEND

from kccl import gpu, topology
from kccl.tools import gpu_probe

# Seconds for each GPU, and for the compiler where the cache has no kernels yet.
LIMIT_S = 20


@pytest.fixture(scope="module")
def probed():
    host = replace(topology.recorded()["intel-xeon-2-cores"], core_to_core_us=None)
    machine = topology.with_gpus(host)
    begin = time.monotonic()
    found = gpu_probe.probed(machine)
    return found, time.monotonic() - begin


def readings(machine, of):
    return {each.what: each.figure.value for each in machine.readings if each.of == of}


def test_a_gpu_is_probed_in_time(probed):
    machine, seconds = probed
    gpus = {each.of for each in machine.readings if ">" not in each.of}
    assert len(gpus) == min(gpu.num_devices(), 8)
    assert seconds < LIMIT_S * len(gpus)


def test_every_pair_of_units_is_measured(probed):
    machine, _ = probed
    for matrix in machine.matrices:
        if matrix.what != "unit_to_unit_us":
            continue
        size = gpu.device(0).multiprocessors
        assert len(matrix.rows) == size == len(set(matrix.rows))
        for i, row in enumerate(matrix.values):
            assert row[i] is None
            others = [us for j, us in enumerate(row) if j != i]
            # Light needs longer than that, and a time-out is no latency.
            assert all(0.05 < us < 5 for us in others)


def test_figures_fit_each_other(probed):
    machine, _ = probed
    for each in topology.Graph(machine).gpus:
        found = readings(machine, each.id)
        if not found:
            continue
        assert found["poll_us"] < found["unit_to_unit_us"]
        assert found["poll_us"] < found["loaded_poll_us"]
        assert found["unit_to_unit_us"] < found["host_us"]
        assert found["from_host_gbps"] < found["memory_gbps"] < found["cache_gbps"]
        assert found["loaded_gbps"] > 0.5 * found["memory_gbps"]


@pytest.mark.skipif(BACKEND != "cuda", reason="AMD's GPUs have dies instead")
def test_partitions_and_groups_cover_all_units(probed):
    machine, _ = probed
    graph = topology.Graph(machine)
    count = gpu.device(0).multiprocessors
    units = [unit for d in graph.of_kind("compute_unit") for unit in d.units or ()]
    gpus = len(units) // count
    assert sorted(units) == sorted(list(range(count)) * gpus)
    if not gpu.device(0).arch.startswith("sm_90"):
        pytest.skip("the halves of L2 are known of Hopper only")
    for each in graph.gpus[:gpus]:
        halves = graph.parts(each.id, "l2_partition")
        assert [graph.count(half.id, "compute_unit") for half in halves] == [count // 2] * 2
        groups = [group for half in halves for group in graph.parts(half.id, "gpc")]
        # Pairs of SMs that run no larger cluster have no known GPC.
        sizes = [graph.count(group.id, "compute_unit") for group in groups]
        assert 6 <= len(sizes) <= 8 and min(sizes) >= 8 and max(sizes) <= 18
        assert sum(sizes) >= count - 16
        found = readings(machine, each.id)
        assert found["same_half_us"] * 1.1 < found["other_half_us"] < found["same_half_us"] * 2
        assert found["near_ticks"] * 1.03 < found["far_ticks"] < found["near_ticks"] * 1.3
        assert found["granule_bytes"] >= 128


def test_a_second_probe_finds_the_same(probed):
    machine, _ = probed
    again = gpu_probe.probed(replace(machine, readings=(), matrices=()))
    first, second = (
        {d.id: d.units for d in topology.Graph(m).of_kind("compute_unit")} for m in (machine, again)
    )
    assert first == second
    for each in topology.Graph(machine).gpus:
        before, after = readings(machine, each.id), readings(again, each.id)
        for what in ("unit_to_unit_us", "memory_gbps", "poll_us"):
            if what in before:
                assert after[what] == pytest.approx(before[what], rel=0.15)
