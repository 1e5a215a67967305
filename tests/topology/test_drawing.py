"""Pictures of machines with GPUs."""

import re
import sys
from dataclasses import replace

import pytest
from long import long_after

from kccl import topology
from kccl.tools import cli

MACHINES = topology.recorded()


@pytest.mark.parametrize("name", long_after(2, ["mi300x-8", "gb200-nvl72", "h200-2x8"]))
def test_a_picture_has_every_gpu_and_way(name, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # its import would now fail
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")  # text stays text
    path = tmp_path / "machine.svg"
    topology.plot(MACHINES[name], path)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
    gpus = len(topology.Graph(MACHINES[name]).gpus)
    assert sum(re.fullmatch(r"gpu\d+", word) is not None for word in words) == gpus
    legends = [word for word in words if "one way, " in word]
    assert len(legends) == (2 if name == "h200-2x8" else 1)
    assert ("CUs" in words) == (name == "mi300x-8")


def test_a_recorded_machine_is_drawn_without_a_probe(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "kccl.tools.probe", None)
    for name in ("pcie-2", "intel-xeon-2-cores"):
        path = tmp_path / f"{name}.png"
        assert cli.main(["topo", "--machine", name, "--plot", str(path)]) == 0
        assert path.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["topo", "--machine", "pcie-2", "--plot", str(tmp_path / "x.foo")]) == 2
    assert "its suffix is '.foo'" in capsys.readouterr().err


def test_unknown_latencies_are_said_to_be_unknown(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    gpus = tuple(topology.Device(id=f"gpu{i}", kind="gpu") for i in range(3))
    link = topology.Link(a="gpu0", b="gpu1", kind="xgmi")
    machine = replace(MACHINES["pcie-2"], devices=gpus, links=(link,), sources=())
    path = tmp_path / "machine.svg"
    topology.plot(machine, path)
    text = path.read_text()
    assert "latency unknown, GB/s unknown (1 pair)" in text
    assert "2 pairs: no known link" in text and "no latency between GPUs is known" in text
