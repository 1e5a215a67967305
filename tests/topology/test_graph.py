"""The graph of devices and links, and the machines recorded with it."""

import json
import re
from dataclasses import replace

import pytest
from source_tree import ROOT

from kccl import topology
from kccl.tools import cli
from kccl.topology import Device, Figure, Graph, Link, Machine, Source
from kccl.topology.device_tables import is_recorded, ways

MACHINES = topology.recorded()
GPUS = {
    "h100-2": 2,
    "h200-2": 2,
    "h200-4": 4,
    "h200-8": 8,
    "mi300x-8": 8,
    "pcie-2": 2,
    "gb200-tray": 4,
    "gb200-nvl72": 72,
    "h200-2x8": 16,
    "intel-xeon-2-cores": 0,
    "intel-xeon-gold-6242-32-cores": 0,
}


@pytest.mark.parametrize(("name", "gpus"), GPUS.items())
def test_recorded_machines_join_every_pair(name, gpus):
    graph = Graph(MACHINES[name])
    assert len(graph.gpus) == gpus
    for route in ways(graph):
        assert route is not None and route.latency_us is not None
        assert all(source in graph.sources for source in route.sources)
    assert set(GPUS) == set(MACHINES)


def test_machines_are_recorded_or_described():
    """A machine whose latencies were measured on another one is described."""
    recorded = {name for name, machine in MACHINES.items() if is_recorded(machine)}
    on_cpus = {"intel-xeon-2-cores", "intel-xeon-gold-6242-32-cores"}
    assert recorded == {"h100-2", "h200-2", "h200-4"} | on_cpus


def test_an_mi300x_has_its_dies():
    graph = Graph(MACHINES["mi300x-8"])
    counts = {kind: graph.count("gpu3", kind) for kind in ("io_die", "die", "compute_unit")}
    assert counts == {"io_die": 4, "die": 8, "compute_unit": 304}
    assert graph.count("gpu3", "memory") == 8
    assert [link.kind for _, link in graph.links_of("gpu3")] == ["xgmi"] * 7
    assert graph.count("gpu3", "nic") is None


def test_a_rack_is_one_domain_and_a_cluster_is_two():
    rack = Graph(MACHINES["gb200-nvl72"])
    assert {rack.node_of(gpu.id) for gpu in rack.gpus} == {f"tray{i}" for i in range(18)}
    assert [route.kinds for route in ways(rack)] == [("nvlink", "nvlink")]
    cluster = Graph(MACHINES["h200-2x8"])
    near = cluster.route("node0/gpu0", "node0/gpu7")
    far = cluster.route("node0/gpu0", "node1/gpu0")
    assert near.latency_us < 1 < far.latency_us == 3
    assert (near.bandwidth_gbps, far.bandwidth_gbps) == (450, 50)
    assert "network" in far.kinds and cluster.node_of("node1/gpu0") == "node1"
    assert Graph(MACHINES["h200-2"]).node_of("gpu0") is None


def test_measured_figures_cite_a_record_that_has_them():
    """The commit is that of a document in the file, whose rows have a value near the figure."""
    found = 0
    for machine in MACHINES.values():
        for source in machine.sources:
            record = re.match(r"(bench/records/\S+\.jsonl?), commit (\w+)[:,] ", source.text)
            assert (record is not None) == (source.kind == "measured"), source
            if not record:
                continue
            values = _recorded(ROOT / record[1], record[2])
            values += [value / 2 for value in values if value]
            for part in (*machine.devices, *machine.links):
                for figure in (part.latency_us, part.bandwidth_gbps):
                    if figure and figure.source == source.id:
                        near = [each for each in values if each]
                        assert any(each == pytest.approx(figure.value, rel=0.01) for each in near)
                        found += 1
    assert found > 20


def test_readings_are_those_of_the_probes_that_they_cite():
    """Also those that are estimates, because another GPU of the model was probed."""
    found = 0
    for machine in MACHINES.values():
        texts = {source.id: source.text for source in machine.sources}
        for reading in machine.readings:
            path = re.search(r"bench/records/\S+_probe\.json", texts[reading.figure.source])
            told = {
                (each["of"], each["what"]): each["figure"]["value"]
                for each in json.loads((ROOT / path[0]).read_text())["readings"]
            }
            value = told[reading.of.rpartition("/")[2], reading.what]
            assert reading.figure.value == pytest.approx(value, rel=0.005), reading
            found += 1
    assert found == 5 * 2 * 7


def _recorded(path, commit):
    """Values of a commit's rows; or, where the record is a probed machine, its readings."""
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        (machine,) = documents
        assert any(f"commit {commit};" in source["text"] for source in machine["sources"])
        return [reading["figure"]["value"] for reading in machine["readings"]]
    rows = [
        row
        for each in documents
        if each["commit"].removesuffix("-dirty") == commit
        for row in each["rows"]
    ]
    return [row.get(name) for row in rows for name in ("floor_us", "bandwidth_gbps")]


def test_the_host_is_part_of_the_graph():
    graph = Graph(MACHINES["intel-xeon-2-cores"])
    assert [device.id for device in graph.of_kind("cpu")] == ["cpu0", "cpu1"]
    assert graph.devices["cpu1"].parent == "numa0"
    assert graph.devices["numa0"].parent == "package0"
    assert graph.route("cpu0", "cpu1").latency_us == pytest.approx(0.146152)
    assert graph.route("cpu0", "cpu1").sources == ("probe",)
    assert graph.route("cpu0", "package0") is None
    with pytest.raises(KeyError):
        graph.route("cpu0", "cpu9")


def small(**changed):
    way = Source(id="way", kind="estimated", text="made up")
    us = Figure(value=1.0, source="way")
    fields = {
        "devices": (Device(id="gpu0", kind="gpu"), Device(id="gpu1", kind="gpu")),
        "links": (Link(a="gpu0", b="gpu1", kind="pcie", latency_us=us),),
        "sources": (way,),
    }
    return replace(MACHINES["intel-xeon-2-cores"], **fields | changed)


def test_unknown_figures_stay_unknown():
    graph = Graph(small())
    route = graph.route("gpu0", "gpu1")
    assert (route.latency_us, route.bandwidth_gbps) == (1.0, None)
    alone = Graph(small(links=(Link(a="gpu0", b="gpu1", kind="pcie"),)))
    assert alone.route("gpu0", "gpu1").latency_us is None
    assert Graph(small(links=())).route("gpu0", "gpu1") is None
    assert Machine.from_json(small().to_json()) == small()


def test_of_two_ways_the_known_and_faster_one_is_taken():
    us = Figure(value=1.0, source="way")
    devices = (*small().devices, Device(id="x", kind="switch"), Device(id="y", kind="switch"))
    unknown = [Link(a=f"gpu{i}", b="x", kind="c2c") for i in range(2)]
    known = [Link(a=f"gpu{i}", b="y", kind="nvlink", latency_us=us) for i in range(2)]
    graph = Graph(small(devices=devices, links=(*unknown, *known)))
    assert graph.route("gpu0", "gpu1").stops == ("gpu0", "y", "gpu1")


def test_traffic_does_not_pass_through_a_third_gpu():
    devices = (*small().devices, Device(id="gpu2", kind="gpu"))
    links = (Link(a="gpu0", b="gpu1", kind="xgmi"), Link(a="gpu1", b="gpu2", kind="xgmi"))
    assert Graph(small(devices=devices, links=links)).route("gpu0", "gpu2") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"devices": [{"id": "a", "kind": "gpu"}] * 2}, "device 'a' is there twice"),
        ({"devices": [{"id": "a", "kind": "chip"}]}, "has kind 'chip', must be one of node"),
        ({"devices": [{"id": "a", "kind": "gpu", "parent": "b"}]}, "parent 'b', which is missing"),
        ({"devices": [{"id": "a", "kind": "gpu", "count": 0}]}, "count 0"),
        ({"devices": [{"id": "a", "kind": "gpu", "colour": "red"}]}, "colour"),
        ({"devices": ["gpu"]}, "format 3"),
        ({"links": [{"a": "gpu0", "b": "gpu9", "kind": "pcie"}]}, "device 'gpu9' is missing"),
        ({"links": [{"a": "gpu0", "b": "gpu0", "kind": "pcie"}]}, "with itself"),
        ({"sources": []}, "source 'way', which is missing"),
        ({"sources": [{"id": "way", "kind": "heard", "text": ""}]}, "kind 'heard'"),
    ],
)
def test_bad_graphs_are_refused(change, message):
    record = small().to_dict()
    with pytest.raises(ValueError, match=message):
        Machine.from_json(json.dumps(record | change))


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_figures_are_positive_and_finite(value):
    with pytest.raises(ValueError, match="must be finite and above 0"):
        Figure(value=value, source="way")


def test_files_of_format_2_are_read():
    new = MACHINES["intel-xeon-2-cores"]
    fields = new.to_dict() | {"format": 2}
    for name in ("title", "devices", "links", "sources"):
        del fields[name]
    old = Machine.from_json(json.dumps(fields))
    assert old == replace(new, title=None)


def test_recorded_machines_are_shown_by_a_command(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")

    def kccl(*arguments):
        return cli.main(["topo", *arguments]), *capsys.readouterr()

    _, document, tables = kccl("--machines", "--json")
    assert set(json.loads(document)) == set(MACHINES)
    assert re.search(r"mi300x-8 +8 x MI300X", tables)
    _, shown, _ = kccl("--machine", "mi300x-8")
    assert re.search(r"compute units +304", shown)
    assert re.search(r"xgmi 3 x1 +28 +0.85 +47", shown)
    code, _, complaint = kccl("--machine", "mi300x")
    assert code == 2 and "Did you mean mi300x-8?" in complaint
    assert "leave out --machine" in kccl("--machine", "h200-2", "--probe")[2]


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("name", [None, "mi300x-8", "gb200-nvl72"])
def test_tables_fit_a_window(name, columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert cli.main(["topo", *(["--machine", name] if name else ["--machines"])]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert max(map(len, lines)) <= columns
    assert any((name or "gb200-nvl72") in line or "GPUs" in line for line in lines)
    if name is None:
        assert {"recorded", "0.0429", "0.146"} < set(re.split(r"[\s,]+", shown))
