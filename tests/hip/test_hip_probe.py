"""The probe of GPUs on a made-up runtime: its kernels run, and each unit plays with each other."""

from dataclasses import replace

import numpy as np
import pytest

from kccl import gpu, topology
from kccl.base.errors import BackendError
from kccl.tools import cli, gpu_probe
from kccl.tools.gpu_probe import within

MACHINE = topology.recorded()["intel-xeon-2-cores"]
UNITS = 5  # an odd number: in each round one has no opponent
SMALL = gpu_probe.Sizes(
    warm_ns=1_000_000,
    trips=6,
    warmup=2,
    repeats=2,
    lines=16,
    polls=8,
    memory_bytes=1 << 16,
    cache_bytes=1 << 15,
    host_bytes=1 << 15,
    threads=128,
    cache_threads=64,
    passes=1,
    batches=1,
    settle_ns=1000,
    host_trips=20,
    peer_bytes=1 << 15,
    peer_trips=10,
)


@pytest.fixture
def two_small_gpus(amd, monkeypatch):
    device = gpu.device
    monkeypatch.setattr(gpu, "device", lambda i: replace(device(i), multiprocessors=UNITS))
    monkeypatch.setattr(gpu_probe, "MOST_GPUS", 2)


def test_two_gpus_are_probed(two_small_gpus):
    found = gpu_probe.probed(MACHINE, SMALL)
    graph = topology.Graph(found)
    assert [each.id for each in graph.gpus] == ["gpu0", "gpu1"]
    assert topology.Machine.from_json(found.to_json()) == found
    for each in graph.gpus:
        told = {r.what: r.figure.value for r in found.readings if r.of == each.id}
        assert set(told) >= {"clock_mhz", "unit_to_unit_us", "memory_gbps", "cache_gbps", "host_us"}
        (matrix,) = (m for m in found.matrices if m.of == each.id and m.what == "unit_to_unit_us")
        size = len(matrix.rows)
        assert size == UNITS and len(set(matrix.rows)) == size
        for i, row in enumerate(matrix.values):
            assert [value is None for value in row] == [i == j for j in range(size)]
    between = {m.what: m.values for m in found.matrices if m.of == "gpus"}
    for what in ("peer_us", "peer_gbps"):
        assert between[what][0][1] > 0 and between[what][0][0] is None
    route = graph.route("gpu0", "gpu1")
    assert route.latency_us > 0 and route.sources == ("gpu_probe",)


def test_the_command_prints_and_draws_them(two_small_gpus, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(gpu_probe, "Sizes", lambda: SMALL)
    path = tmp_path / "machine.json"
    assert cli.main(["topo", "--probe", "--json"]) == 0
    told = capsys.readouterr()
    path.write_text(told.out)
    assert "Measured on the GPUs" in told.err and "one poll under a full stream" in told.err
    assert len(topology.Machine.from_json(told.out).matrices) == 2 * 2 + 2
    pytest.importorskip("matplotlib")
    assert cli.main(["topo", "--from", str(path), "--plot", str(tmp_path / "machine.png")]) == 0


def test_a_dead_host_link_is_named(two_small_gpus, monkeypatch):
    """The kernel that answers the host does not run."""
    run = within.Within._run

    def not_answering(self, name, *args, **how):
        if name != "probe_answer":
            run(self, name, *args, **how)

    monkeypatch.setattr(gpu_probe, "MOST_GPUS", 1)
    monkeypatch.setattr(within.Within, "_run", not_answering)
    monkeypatch.setattr(within, "_HOST_LIMIT_NS", 10_000_000)
    with pytest.raises(BackendError, match="did not answer the host"):
        gpu_probe.probed(MACHINE, SMALL)


def test_a_load_that_was_not_timed_is_an_error(two_small_gpus, monkeypatch):
    """Not a load of 0 ticks."""
    run = within.Within._run

    def without_lines(self, name, *args, **how):
        if name == "probe_lines":
            # The places of the blocks, but no ticks.
            args = (args[0], np.uint32(0), *args[2:])
        run(self, name, *args, **how)

    monkeypatch.setattr(gpu_probe, "MOST_GPUS", 1)
    monkeypatch.setattr(within.Within, "_run", without_lines)
    missing = UNITS * SMALL.lines
    with pytest.raises(BackendError, match=f"{missing} loads of lines by compute units were not"):
        gpu_probe.probed(MACHINE, SMALL)


def test_gpus_are_named_by_their_order_only_where_no_address_is_known(amd):
    gpus = [topology.Device(id=f"gpu{i}", kind="gpu") for i in range(2)]
    machine = replace(MACHINE, devices=tuple(gpus))
    assert gpu_probe._named(machine, [0, 1]) == (machine, ["gpu0", "gpu1"])
    known = replace(machine, devices=(replace(gpus[0], bus_id="0000:7f:1f.0"), gpus[1]))
    with pytest.raises(BackendError, match="PCI addresses do not tell which"):
        gpu_probe._named(known, [0, 1])
