"""What is made of a probe of GPUs: partitions, groups and warnings, on made-up noisy matrices."""

import io
import json
import random
from dataclasses import replace

import numpy as np
import pytest
from source_tree import ROOT

from kccl import topology
from kccl.topology import health
from kccl.topology.partitions import alike, granule, halves, joined

MACHINES = topology.recorded()
UNITS, LINES, SIZE_OF_GROUP = 132, 256, 22
SIDES = [unit // SIZE_OF_GROUP % 2 for unit in range(UNITS)]


def homes(seed):
    """Granules of two lines, in the halves as a hash would have it."""
    some = random.Random(seed)
    return [home for _ in range(LINES // 2) for home in [some.randrange(2)] * 2]


def ticks(gap, noise, seed=0):
    """Loads of each line by each unit, with what units, lines and disturbances add."""
    some, home_of_lines = random.Random(seed), homes(seed)
    of_units = [some.gauss(0, 5) for _ in SIDES]
    of_lines = [some.gauss(0, 8) for _ in range(LINES)]
    return [
        [
            290
            + gap * (side != home)
            + of_units[i]
            + of_lines[k]
            + some.gauss(0, noise)
            + (some.random() < 0.001) * 400
            for k, home in enumerate(home_of_lines)
        ]
        for i, side in enumerate(SIDES)
    ]


# An H200 has a gap of 31.
@pytest.mark.parametrize(("gap", "noise"), [(31, 3), (31, 12), (12, 8)])
def test_halves_are_found_in_noise(gap, noise):
    found = halves(ticks(gap, noise))
    assert list(found.rows) == SIDES
    assert list(found.columns) == homes(0)
    assert found.near == pytest.approx(290, abs=3)
    assert found.far - found.near == pytest.approx(gap, rel=0.1)
    assert granule(found.columns) == 2


@pytest.mark.parametrize("seed", range(5))
def test_noise_has_no_halves(seed):
    assert halves(ticks(0, 8, seed)) is None


def test_few_or_equal_rows_have_no_halves():
    assert halves(ticks(31, 3)[:5]) is None
    assert halves([[300.0] * LINES] * UNITS) is None
    assert halves([]) is None


def test_one_unit_that_is_slow_everywhere_is_no_half():
    values = ticks(0, 8)
    values[3] = [value + 200 for value in values[3]]
    assert halves(values) is None


def test_dies_beside_one_memory_are_alike():
    """8 XCDs on 4 I/O dies, pages spread over these."""
    some = random.Random(1)
    pages = [some.randrange(4) for _ in range(LINES)]
    values = [
        [700 + 90 * (die // 2 != page) + some.gauss(0, 20) for page in pages] for die in range(8)
    ]
    found = alike(values)
    assert found.rows == (0, 0, 1, 1, 2, 2, 3, 3)
    assert list(found.columns) == pages
    assert found.far - found.near == pytest.approx(90, rel=0.1)
    noise = [[some.gauss(700, 20) for _ in pages] for _ in range(8)]
    assert alike(noise) is None


# What probes of two H100 and of two H200 measured. GPUs have other halves, and lines that cut
# across them.
RECORD, OF_H200 = (
    topology.Machine.from_json((ROOT / f"bench/records/nvidia-{name}_2_probe.json").read_text())
    for name in ("h100", "h200")
)
# First SMs of each pair in the sets that ran clusters of 8 on gpu0 of the record. A GPC but the
# first has two such pieces.
PIECES = [range(2 * k, 64, 16) for k in range(8)] + [
    range(62 + 2 * k, 120, 14) for k in range(1, 8)
]


def of_record(gpu, together=()):
    cells = {m.what: m for m in RECORD.matrices if m.of == gpu}
    rows = cells["unit_to_unit_us"].rows
    order = sorted(range(len(rows)), key=rows.__getitem__)
    us, lines = cells["unit_to_unit_us"].values, cells["near_ticks"].values
    return topology.GpuProbe(
        units=tuple(rows[i] for i in order),
        dies=(0,) * len(rows),
        unit_name="sm",
        unit_to_unit_us=[[us[i][j] for j in order] for i in order],
        line_ticks=[lines[i] for i in order],
        line_stride_bytes=128,
        together=together,
    )


@pytest.mark.parametrize("gpu", ["gpu0", "gpu1"])
def test_halves_of_an_h100_are_found_by_words_between_units(gpu):
    machine = topology.with_gpu_probe(MACHINES["h100-2"], gpu, of_record(gpu))
    graph = topology.Graph(machine)
    sides = [graph.count(half.id, "compute_unit") for half in graph.parts(gpu, "l2_partition")]
    assert sides == [66, 66]
    told = {each.what: each.figure.value for each in machine.readings if each.of == gpu}
    assert told["same_half_us"] == pytest.approx(0.288, abs=0.003)
    assert told["other_half_us"] == pytest.approx(0.374, abs=0.004)
    assert told["near_ticks"] * 1.08 < told["far_ticks"]
    assert topology.complaints(machine, MACHINES) == ()


def axes(values):
    """Signs of the first two left and right singular vectors, without means of rows and columns."""
    table = np.array(values, float)
    table -= table.mean(1, keepdims=True) + table.mean(0, keepdims=True) - table.mean()
    left, _, right = np.linalg.svd(table, full_matrices=False)
    return left[:, :2].T > 0, right[:2] > 0


@pytest.mark.parametrize("machine", [RECORD, OF_H200], ids=["h100", "h200"])
@pytest.mark.parametrize("gpu", ["gpu0", "gpu1"])
def test_loads_tell_the_halves_by_their_second_axis_only(machine, gpu):
    cells = {m.what: m for m in machine.matrices if m.of == gpu}
    words = [[each or 0.33 for each in row] for row in cells["unit_to_unit_us"].values]
    assert cells["unit_to_unit_us"].rows == cells["near_ticks"].rows
    (halves_of, _), _ = axes(words)
    units, lines = axes(cells["near_ticks"].values)
    for axis, (least, most) in enumerate([(0.5, 0.55), (0.88, 1)]):
        same = float((units[axis] == halves_of).mean())
        assert least <= max(same, 1 - same) <= most, (axis, same)
    # The first axis changes between granules of two lines, the second one every 32 lines or so.
    assert (lines[:, 0::2] == lines[:, 1::2]).mean() > 0.98
    assert (lines[1][:32] != lines[1][32:]).mean() >= 0.5


def test_a_words_time_depends_on_the_halves_and_hardly_on_its_address():
    record = json.loads((ROOT / "bench/records/nvidia-h200_1_placed.json").read_text())
    ticks = np.array(record["trip_ticks"], float)[1:]
    of_units = ticks.mean(axis=1)
    same = of_units < 1150
    assert sorted((same.sum(), (~same).sum())) == [65, 66]
    for rows, mean in ((ticks[same], 952), (ticks[~same], 1335)):
        assert rows.mean() == pytest.approx(mean, abs=1)
        assert np.abs(rows.mean(axis=0) / rows.mean() - 1).max() < 0.085
    assert not any(row["wrong"] for row in record["rows"])


def clusters():
    some = [tuple(u for first in piece for u in (first, first + 1)) for piece in PIECES]
    some += [(*some[k][:3], *some[k + 7][:2]) for k in range(1, 8)]
    # The last eight SMs ran clusters of two and no larger.
    tails = [(some[6][0], 120, 121), (some[7][0], 122, 123)]
    return (*some, *tails, *((unit, unit + 1) for unit in range(124, 132, 2)))


def test_gpcs_are_pieces_that_clusters_join_and_lone_pairs_are_unknown():
    probe = of_record("gpu0", clusters())
    graph = topology.Graph(topology.with_gpu_probe(MACHINES["h100-2"], "gpu0", probe))
    halves_of = graph.parts("gpu0", "l2_partition")
    found = {each.id: graph.count(each.id, "compute_unit") for each in graph.of_kind("gpc")}
    assert sorted(found.values()) == [8, 16, 16, 16, 16, 16, 18, 18]
    assert [len(graph.parts(half.id, "gpc")) for half in halves_of] == [4, 4]
    unknown = [part.units for half in halves_of for part in graph.parts(half.id, "compute_unit")]
    assert sorted(unit for units in unknown for unit in units) == list(range(124, 132))


@pytest.mark.parametrize(
    ("record", "name", "a_range"),
    [(RECORD, "h100-2", "0.24 to 0.34"), (OF_H200, "h200-2", "0.5 to 1.36")],
    ids=["h100", "h200"],
)
def test_a_probed_machine_is_shown_beside_the_ranges_of_its_like(record, name, a_range):
    file = io.StringIO()
    console = pytest.importorskip("rich.console").Console(width=150, file=file)
    console.print(topology.table(record, MACHINES))
    text = file.getvalue()
    assert f"expected: as on {name}" in text and a_range in text
    assert "compute units of an unknown GPC" in text
    assert topology.complaints(record, MACHINES) == ()


def test_units_of_one_cluster_are_one_group():
    groups = joined(range(7), [(0, 2), (2, 4), (1, 3), (5,)])
    assert groups == ((0, 2, 4), (1, 3), (5,), (6,))


def probe(**changed):
    some = random.Random(2)
    us = [
        [
            None if i == j else 0.3 + 0.03 * (SIDES[i] != SIDES[j]) + some.gauss(0, 0.005)
            for j in range(UNITS)
        ]
        for i in range(UNITS)
    ]
    groups = [tuple(range(k, k + SIZE_OF_GROUP)) for k in range(0, UNITS, SIZE_OF_GROUP)]
    fields = {
        "units": tuple(range(UNITS)),
        "dies": (0,) * UNITS,
        "unit_name": "sm",
        "unit_to_unit_us": us,
        "line_ticks": ticks(31, 6),
        "line_stride_bytes": 128,
        "together": tuple(
            tuple(sorted(some.sample(group, 8))) for group in groups for _ in range(20)
        ),
        "figures": {"clock_mhz": 1980.0, "memory_gbps": 4300.0},
    }
    return topology.GpuProbe(**fields | changed)


def h200(**changed):
    """A machine as NVML tells of it, with a probe of its first GPU."""
    machine = replace(MACHINES["h200-2"], ranges=())
    return topology.with_gpu_probe(machine, "gpu0", probe(**changed))


def test_a_probe_becomes_a_part_of_the_graph():
    machine = h200()
    graph = topology.Graph(machine)
    halves_of = graph.parts("gpu0", "l2_partition")
    assert [graph.count(half.id, "compute_unit") for half in halves_of] == [66, 66]
    groups = graph.of_kind("gpc")
    assert len(groups) == UNITS // SIZE_OF_GROUP
    units = [unit for device in graph.of_kind("compute_unit") for unit in device.units or ()]
    assert sorted(units) == list(range(UNITS))
    gpu = graph.devices["gpu0"]
    assert gpu.bandwidth_gbps == topology.Figure(value=4300, source="gpu_probe")
    assert gpu.latency_us.value == pytest.approx(0.315, abs=0.003)
    assert graph.sources["gpu_probe"].kind == "measured"
    assert graph.count("gpu1", "compute_unit") == UNITS  # as it was
    assert topology.Machine.from_json(machine.to_json()) == machine
    told = {each.what: each.figure.value for each in machine.readings}
    assert told["granule_bytes"] == 256 and told["far_ticks"] > told["near_ticks"]


def test_a_second_probe_replaces_the_first():
    machine = topology.with_gpu_probe(h200(), "gpu0", probe(figures={"clock_mhz": 1500.0}))
    clocks = [each.figure.value for each in machine.readings if each.what == "clock_mhz"]
    assert clocks == [1500.0]
    assert len(machine.matrices) == 2 and [s.id for s in machine.sources].count("gpu_probe") == 1


def test_dies_are_those_that_the_hardware_names():
    some = random.Random(4)
    pages = [some.randrange(4) for _ in range(LINES)]
    dies = tuple(i // 2 for i in range(16))
    lines = [[700 + 90 * (die // 2 != page) + some.gauss(0, 9) for page in pages] for die in dies]
    us = [[None if i == j else 0.7 for j in range(16)] for i in range(16)]
    units = tuple(die << 8 | i for i, die in enumerate(dies))
    made = {"units": units, "dies": dies, "unit_name": "cu", "unit_to_unit_us": us}
    machine = topology.with_gpu_probe(
        MACHINES["mi300x-8"], "gpu0", probe(**made, line_ticks=lines, together=())
    )
    graph = topology.Graph(machine)
    assert [graph.count(each.id, "die") for each in graph.parts("gpu0", "io_die")] == [2] * 4
    assert graph.devices["gpu0/iod1/xcd2/cu"].units == (0x204, 0x205)


def pairs(us, gbps):
    gpus = tuple(f"gpu{i}" for i in range(len(us)))
    return topology.PairsProbe(gpus=gpus, peer_us=us, peer_gbps=gbps)


def test_pairs_become_figures_of_links():
    us, gbps = [[None, 0.74], [0.76, None]], [[None, 390.0], [400.0, None]]
    machine = topology.with_pairs_probe(MACHINES["h200-2"], pairs(us, gbps))
    route = topology.Graph(machine).route("gpu0", "gpu1")
    assert route.latency_us == pytest.approx(0.75) and route.bandwidth_gbps == 395
    assert route.sources == ("gpu_probe",) and len(machine.links) == 2
    bare = replace(MACHINES["h200-2"], links=())
    assert [link.kind for link in topology.with_pairs_probe(bare, pairs(us, gbps)).links] == [
        "nvlink"
    ]
    slow = [[None, 25.0], [25.0, None]]
    assert [link.kind for link in topology.with_pairs_probe(bare, pairs(us, slow)).links] == [
        "pcie"
    ]


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("clock_mhz", 900.0),
        ("memory_gbps", 2500.0),
        ("from_host_gbps", 6.0),
        ("loaded_poll_us", 9.0),
    ],
)
def test_a_number_out_of_its_range_is_named(what, value):
    machine = h200(figures={what: value})
    (told,) = topology.complaints(machine, MACHINES)
    assert told.startswith("gpu0: ") and f"{value:.4g}" in told and "as on h200-2" in told
    assert "check " in told
    assert topology.complaints(h200(), MACHINES) == ()


def test_no_ranges_are_known_of_other_gpus():
    machine = h200(figures={"clock_mhz": 1.0})
    other = [replace(d, name="NVIDIA B9") if d.kind == "gpu" else d for d in machine.devices]
    machine = replace(machine, devices=tuple(other))
    assert health.expected(machine, MACHINES) is None
    assert topology.complaints(machine, MACHINES) == ()


def test_a_slow_pair_and_a_missing_link_are_named():
    us = [[None if i == j else 0.75 for j in range(4)] for i in range(4)]
    us[1][2] = us[2][1] = 1.6
    gbps = [[None if i == j else 400.0 for j in range(4)] for i in range(4)]
    gbps[3][0] = 180.0
    machine = replace(MACHINES["h200-4"], ranges=())
    told = topology.complaints(topology.with_pairs_probe(machine, pairs(us, gbps)), {})
    assert [each.split(":")[0] for each in told] == ["gpu1 > gpu2", "gpu2 > gpu1", "gpu3 > gpu0"]
    lame = replace(
        MACHINES["h200-2"],
        links=tuple(replace(each, count=17) for each in MACHINES["h200-2"].links[:1])
        + MACHINES["h200-2"].links[1:],
    )
    (told,) = topology.complaints(lame, MACHINES)
    assert "gpu0: 17 active links" in told and "expected 18" in told


def test_a_slow_unit_is_named():
    us = probe().unit_to_unit_us
    us[17] = [value and value * 1.5 for value in us[17]]
    (told,) = topology.complaints(h200(unit_to_unit_us=us, figures={}), {})
    assert told.startswith("gpu0, compute unit 17: ")


def test_the_matrices_are_drawn(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    path = tmp_path / "machine.svg"
    topology.plot(h200(), path)
    text = path.read_text()
    assert "from compute unit" in text and "gpu0: a load from L2" in text


def test_known_ranges_have_a_source():
    for name in ("h100-2", "h200-2"):
        machine = MACHINES[name]
        assert {each.what for each in machine.ranges} <= set(topology.QUANTITIES)
        assert len({each.what for each in machine.ranges}) == len(machine.ranges) > 10
    with pytest.raises(ValueError, match="missing"):
        replace(MACHINES["h200-2"], sources=())


def test_memories_of_parts_that_a_probe_does_not_find_are_the_gpus():
    machine = topology.with_gpu_probe(MACHINES["mi300x-8"], "gpu0", of_record("gpu0"))
    memories = topology.Graph(machine).parts("gpu0", "memory")
    assert [memory.id for memory in memories] == [f"gpu0/iod{number}/hbm" for number in range(4)]


def test_halves_that_a_probe_finds_have_the_latency_within_them():
    machine = topology.with_gpu_probe(MACHINES["h200-2"], "gpu0", of_record("gpu0"))
    for half in topology.Graph(machine).parts("gpu0", "l2_partition"):
        assert half.latency_us.value == pytest.approx(0.288, abs=0.003)
    placed = topology.place_blocks(machine, "grid_sync", lanes=2)
    assert len(set(placed.layout.seats)) == 2 and len(set(placed.layout.homes)) == 1
    assert "2 of 2 lanes have blocks of one part of the GPU only" in placed.explain()
