"""The topology package, on fake sysfs trees and on the recorded machines."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kccl import topology
from kccl.topology import Cache, Cpu, Machine, NumaNode

PACKAGE = Path(topology.__file__).parent
CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"
UNKNOWN = Machine(
    cpu_model=None,
    architecture=None,
    kernel=None,
    cpus=(),
    allowed_cpus=None,
    caches=(),
    numa_nodes=(),
    memory_bytes=None,
)


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def smt_two_nodes() -> dict[str, str]:
    """2 packages x 2 cores x 2 threads, numbered as Linux does: CPU i and i + 4 are one core."""
    local = ("0-1,4-5", "2-3,6-7")
    files = {
        f"{CPUS}/online": "0-7",
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Fake  CPU\n\nprocessor\t: 1",
        "proc/meminfo": "MemTotal:       1024 kB\nMemFree:         512 kB",
        "proc/self/status": "Cpus_allowed:\t5f\nCpus_allowed_list:\t0-4,6",
        "proc/sys/kernel/osrelease": "6.1.0",
        "proc/sys/kernel/arch": "x86_64",
        f"{NODES}/has_cpu": "0-1",
        f"{NODES}/node10/cpulist": "",  # memory only
        f"{NODES}/node10/distance": "20 20 10",
    }
    for node, distance in enumerate(("10 21 20", "21 10 20")):
        files[f"{NODES}/node{node}/cpulist"] = local[node]
        files[f"{NODES}/node{node}/distance"] = distance
        files[f"{NODES}/node{node}/meminfo"] = f"Node {node} MemTotal:  {512 + node} kB"
    for cpu in range(8):
        folder, package, siblings = f"{CPUS}/cpu{cpu}", cpu % 4 // 2, f"{cpu % 4},{cpu % 4 + 4}"
        files[f"{folder}/topology/core_id"] = str(cpu % 2)
        files[f"{folder}/topology/physical_package_id"] = str(package)
        files[f"{folder}/topology/thread_siblings_list"] = siblings
        caches = [("1", "Data", "48K", siblings), ("3", "Unified", "32M", local[package])]
        for index, values in enumerate(caches):
            names = ("level", "type", "size", "shared_cpu_list", "coherency_line_size")
            for name, value in zip(names, (*values, "64"), strict=True):
                files[f"{folder}/cache/index{index}/{name}"] = value
    return files


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return topology.discover(write_tree(tmp_path / "smt_two_nodes", smt_two_nodes()))


def near_or_far(a: int, b: int) -> float:
    """Latency between two CPUs of smt_two_nodes, in microseconds."""
    return 0.012 if a % 4 == b % 4 else 0.05 if a % 4 // 2 == b % 4 // 2 else 0.13


def shown(machine: Machine, table: object = None, width: int = 80) -> str:
    console = pytest.importorskip("rich.console").Console(width=width, file=io.StringIO())
    console.print(table or topology.table(machine, topology.recorded()))
    text: str = console.file.getvalue()
    return text


def test_tables_can_be_read_in_80_columns() -> None:
    """No column is so narrow that a range or a name of a few words takes many lines."""
    recorded = topology.recorded()
    found = shown(recorded["h200-2"])
    for told in ("0.3299   0.3302   us     0.24 to 0.38", "GB/s   3900 to 4800"):
        assert told in found, found
    text = shown(recorded["h200-2"], topology.machines_table(recorded))
    assert len(text.splitlines()) < 5 * len(recorded), text
    assert all(len(line) <= 80 for line in (found + text).splitlines())


@pytest.mark.parametrize("width", [40, 80, 140])
def test_the_list_of_machines_says_in_any_window_what_each_is(width: int) -> None:
    recorded = topology.recorded()
    text = shown(recorded["h200-2"], topology.machines_table(recorded), width)
    words = " ".join(text.split())
    for name in recorded:
        assert any(line.split()[:1] == [name] for line in text.splitlines()), name
    assert "an NVL72 rack" in words or width == 140
    assert all(len(line) <= width for line in text.splitlines())
    assert "nearest us" in text
    assert text.splitlines()[0 if width > 40 else 1].endswith("(by documents)")


def test_discover_reads_smt_and_numa(machine: Machine) -> None:
    assert (machine.cpu_model, machine.architecture) == ("Fake CPU", "x86_64")
    assert (machine.kernel, machine.memory_bytes) == ("6.1.0", 1 << 20)
    assert machine.online_cpus == tuple(range(8))
    assert machine.allowed_cpus == (0, 1, 2, 3, 4, 6)
    assert (machine.num_packages, machine.num_cores) == (2, 4)
    assert machine.cpus[7] == Cpu(id=7, core_id=1, package=1, numa_node=1, smt_siblings=(3, 7))
    assert machine.numa_nodes[1] == NumaNode(
        id=1, cpus=(2, 3, 6, 7), memory_bytes=513 * 1024, distances=(21, 10, 20)
    )
    assert [(node.id, len(node.cpus)) for node in machine.numa_nodes] == [(0, 4), (1, 4), (10, 0)]
    assert len(machine.caches) == 4 + 2
    assert machine.caches[-1] == Cache(
        level=3, type="unified", size_bytes=32 << 20, line_bytes=64, shared_cpus=(2, 3, 6, 7)
    )


def test_cache_bytes_are_of_the_level_that_holds_most(machine: Machine) -> None:
    def cache(level: int, size: int | None, *cpus: int, kind: str = "unified") -> Cache:
        return Cache(level=level, type=kind, size_bytes=size, line_bytes=64, shared_cpus=cpus)

    found = replace(
        machine,
        caches=(
            *(cache(2, 100, 0, 1), cache(2, 100, 2, 3), cache(1, 999, 0, kind="instruction")),
            *(cache(3, 150, 0, 1, 2, 3), cache(3, 7000, 4), cache(4, None, 0)),
        ),
    )
    # The two of level 2 hold more than the one behind them.
    assert found.cache_bytes([0]) == 150
    assert found.cache_bytes([0, 1, 3]) == 200
    assert found.cache_bytes([0, 4]) == 7150
    assert found.cache_bytes([]) == found.cache_bytes([9]) == 0


def test_what_is_missing_is_unknown(tmp_path: Path) -> None:
    assert topology.discover(tmp_path / "empty") == UNKNOWN
    for name in ("CPU model", "packages", "cores", "online CPUs", "allowed CPUs", "memory"):
        assert re.search(rf"{name} +unknown", shown(UNKNOWN))
    files = {name: text for name, text in smt_two_nodes().items() if "/cache/" not in name}
    no_caches = topology.discover(write_tree(tmp_path / "no_caches", files))
    assert no_caches.caches == ()
    assert re.search(r"Caches\n.*\n.*\n unknown", shown(no_caches))
    files = {name: text for name, text in smt_two_nodes().items() if "shared_cpu" not in name}
    no_sharing = topology.discover(write_tree(tmp_path / "no_sharing", files))
    assert {(c.level, c.shared_cpus) for c in no_sharing.caches} == {(1, None), (3, None)}
    assert re.search(r"L3 unified +32 MiB +64 B +unknown +unknown", shown(no_sharing))


@pytest.mark.parametrize("text", ["", "-1", "garbage", "0-", "5-x", "²", "0,,1", "MemTotal:"])
def test_unreadable_values_do_not_crash(tmp_path: Path, text: str) -> None:
    machine = topology.discover(write_tree(tmp_path, dict.fromkeys(smt_two_nodes(), text)))
    # The names of folders still say which CPUs there are; every other fact is unknown.
    assert machine.online_cpus == tuple(range(8))
    assert all(cpu.package is None and cpu.numa_node is None for cpu in machine.cpus)
    assert shown(machine)


def test_offline_cpus_are_left_out(tmp_path: Path) -> None:
    listed = {f"{CPUS}/online": "0,2", **{f"{CPUS}/cpu{cpu}/online": "1" for cpu in range(4)}}
    assert topology.discover(write_tree(tmp_path / "listed", listed)).online_cpus == (0, 2)
    flagged = {f"{CPUS}/cpu{cpu}/online": str(cpu % 2) for cpu in range(12)}
    odd = topology.discover(write_tree(tmp_path / "flagged", flagged)).online_cpus
    assert odd == (1, 3, 5, 7, 9, 11)
    cpuinfo = {"proc/cpuinfo": "processor: 0\nCPU implementer: 0x41\nCPU part: 0xd4f"}
    jail = topology.discover(write_tree(tmp_path / "jail", cpuinfo))
    assert (jail.online_cpus, jail.cpu_model) == ((0,), "Arm Neoverse-V2")


def test_live_discovery_respects_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3}, raising=False)
    assert topology.discover().allowed_cpus == (3, 5)


def test_records_round_trip(machine: Machine) -> None:
    files = sorted(PACKAGE.glob("machines/*.json"))
    assert [path.stem for path in files] == list(topology.recorded()) != []
    for path in files:
        assert topology.recorded()[path.stem].to_json() == path.read_text("utf-8")
    probed = topology.core_to_core(machine, lambda a, b: 0.1 / 3, cpus=[0, 3, 6])
    for original in (UNKNOWN, machine, probed):
        assert Machine.from_json(original.to_json()) == original


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, rf"format 99, .* reads 2 and {topology.FORMAT}"),
        ({"caches": None}, "not iterable"),
        ({"hostname": "secret"}, "hostname"),
        ({"core_to_core_us": [[None]]}, "0 x 0"),
    ],
)
def test_bad_records_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Machine.from_json(json.dumps(UNKNOWN.to_dict() | change))


def test_core_to_core_takes_medians_of_allowed_cpus(machine: Machine) -> None:
    calls: list[tuple[int, int]] = []
    progress: list[tuple[int, int]] = []

    def ping_pong(a: int, b: int) -> float:
        calls.append((a, b))
        return a + 0.1 * b + (50.0 if calls.count((a, b)) in (2, 4) else 1.0)

    probed = topology.core_to_core(machine, ping_pong, on_progress=lambda *p: progress.append(p))
    # CPUs 5 and 7 are outside the affinity mask, which leaves 6 x 5 ordered pairs.
    assert progress == [(done, 150) for done in range(1, 151)]
    assert machine.core_to_core_us is None
    for a, row in enumerate(probed.core_to_core_us or ()):
        for b, latency_us in enumerate(row):
            is_measured = a != b and not {a, b} & {5, 7}
            assert latency_us == (pytest.approx(a + 0.1 * b + 1.0) if is_measured else None)


@pytest.mark.parametrize(
    ("most", "cpus"),
    [
        (0, ()),
        (1, (0,)),
        (2, (0, 3)),
        (3, (0, 2, 4)),
        (6, (0, 1, 2, 3, 4, 6)),
        (99, (0, 1, 2, 3, 4, 6)),
    ],
)
def test_some_cpus_are_spread_over_the_allowed_ones(
    machine: Machine, most: int, cpus: tuple[int, ...]
) -> None:
    assert topology.spread(machine, most) == cpus


@pytest.mark.parametrize(
    ("cpus", "num_samples", "ping_pong", "message"),
    [
        ([0], 5, near_or_far, "needs two CPUs, got 1"),
        ([0, 1, 0], 5, near_or_far, "twice"),
        ([0, 8], 5, near_or_far, "CPU 8 is not online"),
        ([0, 5], 5, near_or_far, "CPU 5 is outside the affinity mask"),
        ([0, 1], 4, near_or_far, "at least 5"),
        ([0, 1], 5, lambda a, b: float("nan"), "returned nan microseconds"),
    ],
)
def test_core_to_core_refuses(
    machine: Machine,
    cpus: list[int],
    num_samples: int,
    ping_pong: Callable[[int, int], float],
    message: str,
) -> None:
    with pytest.raises(ValueError, match=message):
        topology.core_to_core(machine, ping_pong, cpus, num_samples=num_samples)


def test_latencies_are_shown_by_relation(machine: Machine) -> None:
    assert "kccl topo --probe" in shown(machine)
    text = shown(topology.core_to_core(machine, near_or_far))
    for line in (r"same core \(SMT\) +4 +12 +12 +12", r"shared L3 +8 +50", r"other package +18"):
        assert re.search(line, text)
    assert re.search(r"^ +0 +4 +1 +2 +6 +3$", text, re.MULTILINE)  # near CPUs side by side


def test_cpus_that_look_busy_are_named(machine: Machine) -> None:
    idle = topology.core_to_core(machine, near_or_far)
    assert topology.complaints(idle, {}) == ()
    busy = topology.core_to_core(machine, lambda a, b: 16.4 if {a, b} == {0, 1} else 0.05)
    (told,) = topology.complaints(busy, {})
    assert told.startswith(
        "1 of 15 pairs of CPUs takes over 1 us for a cache line, the slowest 16.4"
    )
    # A slow direction is enough.
    busy = topology.core_to_core(machine, lambda a, b: 16.4 if (a, b) == (0, 1) else 0.05)
    assert topology.complaints(busy, {}) == (told,)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_writes_a_picture(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # its import would now fail
    path = tmp_path / f"core_to_core.{suffix}"
    with pytest.raises(ValueError, match="kccl topo --probe"):
        topology.plot(machine, path)
    topology.plot(topology.core_to_core(machine, near_or_far), path)
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_package_stands_alone() -> None:
    # No site-packages (-S), no working directory (-I): the standard library has to do.
    script = f"import sys; sys.path.append({str(PACKAGE.parent)!r}); import topology"
    script += "; assert not {'kccl', 'rich', 'matplotlib', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-B", "-I", "-S", "-c", script], check=True, timeout=60)
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{path.name} imports from outside the package"
                names = [node.module or ""]
            assert not any(name.split(".")[0] == "kccl" for name in names), path.name
    assert all(hasattr(topology, name) for name in topology.__all__)


def test_names_that_are_imported_when_used_are_those_that_types_know() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    known = {}
    for node in checked.body:
        assert isinstance(node, ast.ImportFrom)
        for name in node.names:
            known[name.asname or name.name] = (node.module, name.name)
    found = {}
    for public, path in topology._LAZY.items():
        module, _, own = path.partition(".")
        found[public] = (module, own or public)
    assert found == known
    assert all(hasattr(topology, name) for name in topology.__all__)
    with pytest.raises(AttributeError, match=r"module 'kccl\.topology' has no attribute 'tabel'"):
        topology.tabel  # noqa: B018
