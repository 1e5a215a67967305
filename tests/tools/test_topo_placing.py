"""`kccl topo`: places ranks and blocks on any machine, and says why something is refused."""

import os
from types import SimpleNamespace

import pytest

import kccl
from kccl import topology
from kccl.bench.harness import others
from kccl.tools import cli, probe


@pytest.fixture
def topo(capsys):
    """Runs the command: (exit code, stdout, stderr)."""
    return lambda *arguments: (cli.main(["topo", *arguments]), *capsys.readouterr())


def test_ranks_are_placed_on_the_machine_that_is_shown(topo, tmp_path, monkeypatch):
    """Not on this machine's cores."""
    code, shown, _ = topo("--machine", "intel-xeon-gold-6242-32-cores", "-n", "24")
    assert code == 0
    assert "group 12-17 on cpu16, cpu17, cpu18, cpu19, cpu20, cpu21; rank 12 leads" in shown
    assert (
        "predicted for the words of a barrier: 0.21 us. In the layout 'flat' 0.22 us on the CPUs "
        "that it chooses, and 0.32 us on those above"
    ) in shown
    path = tmp_path / "machine.json"
    path.write_text(topology.recorded()["intel-xeon-gold-6242-32-cores"].to_json())
    assert topo("--from", str(path), "-n", "24")[1] == shown
    flat = topo("--from", str(path), "-n", "24", "--layout", "flat")[1]
    assert "group 0-7" in flat and "group 12-17" not in flat
    # As `kccl run` would place them.
    monkeypatch.setenv("KCCL_LAYOUT", "flat")
    assert topo("--from", str(path), "-n", "24")[1] == flat
    monkeypatch.undo()
    # A machine of which the GPUs are known: a GPU each.
    shown = topo("--machine", "h200-2x8", "-n", "16")[1]
    assert "group 0-7 on node0/gpu0, node0/gpu1" in shown


def test_blocks_are_placed(topo):
    place = ("--machine", "mi300x-8", "--place", "grid_sync")
    shown = topo(*place, "--lanes", "8", "--layout", "leaders")[1]
    assert "gpu0/iod3/xcd7: 38 blocks, lane 7, poll words in gpu0/iod3's memory; block 7" in shown
    assert "block 7 leads" in shown
    assert "8 counters, a line of 128 bytes or more each, in 1 memory; block 0" in topo(*place)[1]
    flat = topo("--machine", "mi300x-8", "--place", "grid_sync", "--layout", "flat")[1]
    reasons = topo("--machine", "h200-2", "--place", "grid_sync")[1].split("layout 'counters'")[1]
    assert "waits for its own" in reasons
    assert "grid_sync of 304 blocks, layout 'flat'" in flat


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        *(
            (("--machines", *given), f"{given[0]} is for one machine, and --machines lists them")
            for given in (
                ("--plot", "f.png"),
                ("--probe",),
                ("-n", "2"),
                ("--cpus", "2"),
                ("--place", "publish"),
            )
        ),
        (("--cpus", "2"), "--cpus is for a probe of this machine's CPUs"),
        (("--machine", "h200-2", "--cpus", "2"), "--cpus is for a probe"),
        (("--machine", "h200-2", "--probe"), "--probe measures this machine: leave out --machine"),
        (("--lanes", "2"), "--lanes is for --place"),
        (("--machine", "h200-2", "--place", "publish", "--lanes", "0"), "lanes is 0, must be 1 to"),
        (("--layout", "flat"), "--layout is for -n or --place"),
        (("--machine", "pcie-2", "-n", "3"), "-n is 3, must be 1 to 2"),
        (("-n", "2", "--layout", "copies"), "--layout is 'copies', must be one of topology, flat"),
        (("--machine", "intel-xeon-2-cores", "--place", "publish"), "has no GPU"),
    ],
)
def test_what_has_no_effect_is_refused(topo, arguments, told):
    code, _, complaint = topo(*arguments)
    assert code == 2 and told in complaint


@pytest.mark.parametrize(("share", "told"), [(0.04, ""), (0.43, "other programs had 43%")])
def test_a_probe_beside_other_programs_looks_ill(topo, monkeypatch, share, told):
    monkeypatch.setattr(others.Others, "share", lambda _: share)
    monkeypatch.setattr(probe, "core_to_core_us", lambda *_: 0.05)
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this machine has one core")
    shown = topo("--probe", "--cpus", "2")[1]
    assert ("looks ill" in shown) == bool(told) and told in shown


@pytest.mark.parametrize(
    ("allowed", "told"),
    [({0, 1}, "other processes keep them busy"), ({0}, "must be allowed to use both")],
)
def test_a_probe_without_an_answer_says_why(monkeypatch, allowed, told):
    monkeypatch.setattr(probe, "lib", SimpleNamespace(kccl_host_core_ping_pong=lambda *_: -1.0))
    monkeypatch.setattr("os.sched_getaffinity", lambda _: allowed)
    with pytest.raises(kccl.Timeout, match=told):
        probe.core_to_core_us(1, 0)
