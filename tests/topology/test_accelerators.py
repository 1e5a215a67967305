"""Discovery of GPUs: from sysfs of AMD's driver, from answers of NVML and amdsmi, from procfs."""

import json
import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from kfd_tree import KFD, lines, mi300x, write
from source_tree import ROOT

from kccl import topology
from kccl.tools import cli
from kccl.topology import Graph

HOST = topology.recorded()["intel-xeon-2-cores"]


def test_amd_gpus_are_read_from_kfd(tmp_path):
    machine = topology.with_gpus(HOST, write(tmp_path, mi300x()))
    graph = Graph(machine)
    assert [gpu.name for gpu in graph.gpus] == ["AMD Instinct MI300X"] * 8
    assert [gpu.numa_node for gpu in graph.gpus] == [0] * 4 + [1] * 4
    assert (graph.count("gpu5", "die"), graph.count("gpu5", "compute_unit")) == (8, 304)
    assert graph.gpus[1].bus_id == "0000:15:00.0"
    assert graph.gpus[0].memory_bytes.value == 192 << 30
    assert graph.gpus[0].bandwidth_gbps.value == pytest.approx(5324.8)
    route = graph.route("gpu2", "gpu7")
    assert (route.kinds, route.latency_us, route.bandwidth_gbps) == (("xgmi",), None, 50)
    assert len(machine.links) == 28
    assert topology.Machine.from_json(machine.to_json()) == machine


def test_gpus_that_a_container_hides_are_left_out(tmp_path):
    files = mi300x()
    for hidden in (2, 3, 4, 6):
        # The kernel answers EPERM; an empty file reads alike.
        files[f"{KFD}/{hidden}/properties"] = ""
    del files[f"{KFD}/5/mem_banks/0/properties"]
    graph = Graph(topology.with_gpus(HOST, write(tmp_path, files)))
    assert [gpu.id for gpu in graph.gpus] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert graph.gpus[0].memory_bytes is None and graph.gpus[0].bandwidth_gbps is None
    assert graph.gpus[0].bus_id == "0000:35:00.0"
    assert len(graph.links) == 6 + 1  # and one between the two CPUs


@pytest.mark.parametrize("text", ["", "simd_count", "simd_count -1", "simd_count x", "\x00\xff"])
def test_unreadable_kfd_files_do_no_harm(tmp_path, text):
    assert topology.with_gpus(HOST, write(tmp_path, dict.fromkeys(mi300x(2), text))) == HOST


def test_an_unknown_amd_gpu_keeps_its_architecture(tmp_path):
    files = mi300x(1)
    facts = lines(simd_count=128, simd_per_cu=2, gfx_target_version=90010)
    files[f"{KFD}/2/properties"] = facts
    graph = Graph(topology.with_gpus(HOST, write(tmp_path, files)))
    assert graph.gpus[0].name == "AMD gfx90a"
    assert (graph.count("gpu0", "die"), graph.count("gpu0", "compute_unit")) == (None, 64)


class Nvml:
    """NVML with given answers: name -> the answer, or a list of one for each GPU, or a function.
    What is not given is not supported.
    """

    class NVMLError(Exception):
        pass

    def __init__(self, gpus, **answers):
        self.running = 0
        self._answers = {"nvmlDeviceGetCount": lambda: gpus} | answers

    def nvmlInit(self):
        self.running += 1

    def nvmlShutdown(self):
        self.running -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def __getattr__(self, name):
        def ask(handle=None, *given):
            if name not in self._answers:
                raise self.NVMLError("Not Supported")
            answer = self._answers[name]
            if callable(answer):
                return answer(*(() if handle is None else (handle, *given)))
            return answer[handle] if isinstance(answer, list) else answer

        return ask


def buses(*numbers):
    return [SimpleNamespace(busId=f"00000000:{number:02X}:00.0") for number in numbers]


def hopper(gpus, links=18, **changed):
    def state(handle, link):
        if link >= links:
            raise Nvml.NVMLError("Invalid Argument")
        return 1

    answers = {
        "nvmlDeviceGetName": "NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_754_820_096),
        "nvmlDeviceGetMemoryBusWidth": 6016,
        "nvmlDeviceGetMaxClockInfo": lambda handle, clock: 3201,
        "nvmlDeviceGetPciInfo": buses(*(0x1B + 16 * i for i in range(gpus))),
        # Words of a set of nodes: the host's, not the node that the GPU's own memory is.
        "nvmlDeviceGetMemoryAffinity": [(1 << i // 4, 0, 0, 0) for i in range(gpus)],
        "nvmlDeviceGetNumaNodeId": [8 + i for i in range(gpus)],
        "nvmlDeviceGetNumGpuCores": 16896,
        "nvmlDeviceGetCudaComputeCapability": (9, 0),
        "nvmlDeviceGetNvLinkState": state,
        # NVML's numbers, and what one driver said of an H100: 5.0.
        "nvmlDeviceGetNvLinkVersion": lambda handle, link: 7,
        "nvmlDeviceGetNvLinkRemoteDeviceType": lambda handle, link: 2,
        "nvmlDeviceGetNvLinkRemotePciInfo": lambda handle, link: buses(0x07)[0],
        "nvmlDeviceGetMaxPcieLinkGeneration": 5,
        "nvmlDeviceGetMaxPcieLinkWidth": 16,
    }
    known = {name: answer for name, answer in (answers | changed).items() if answer is not None}
    return Nvml(gpus, **known)


def recorded():
    """NVML with the answers of two H200 in a virtual machine. For each function the file has nested
    lists, by those arguments on which its answers depend.
    """
    text = (Path(__file__).parent / "answers/nvml_h200-2.json").read_text()
    told = vars(json.loads(text, object_hook=lambda fields: SimpleNamespace(**fields)))
    depths = {"nvmlDeviceGetP2PStatus": 3}

    def answer(name, *given):
        found = told[name]
        for index in given[: depths.get(name, 2 if "NvLink" in name else 1)]:
            found = found[index]
        if hasattr(found, "error"):
            raise Nvml.NVMLError(found.error)
        return found

    return Nvml(told["nvmlDeviceGetCount"], **{name: partial(answer, name) for name in told})


def test_nvidia_gpus_are_told_of_by_recorded_answers(tmp_path):
    """In the same run a probe recorded what `kccl topo` shows there."""
    nvml = recorded()
    # There sysfs has -1 for the NUMA node of a PCI device, so NVML's affinity tells it.
    cards = [f"sys/bus/pci/devices/0000:00:0{bus}.0/numa_node" for bus in (6, 7)]
    machine = topology.with_gpus(HOST, write(tmp_path, dict.fromkeys(cards, "-1\n")), nvml)
    assert nvml.running == 0
    assert topology.Machine.from_json(machine.to_json()) == machine
    graph = Graph(machine)
    assert [graph.count(gpu.id, "compute_unit") for gpu in graph.gpus] == [132, 132]
    assert graph.gpus[0].bandwidth_gbps.value == pytest.approx(4814.3, rel=1e-5)
    route = graph.route("gpu0", "gpu1")
    assert (route.stops, route.bandwidth_gbps) == (("gpu0", "nvswitch", "gpu1"), 450)
    (access,) = machine.accesses
    assert (access.reads, access.writes, access.atomics) == (True, True, True)
    path = ROOT / "bench/records/nvidia-h200_2_probe.json"
    probed = topology.Machine.from_json(path.read_text())
    assert machine.accesses == probed.accesses
    for made in (machine, probed):
        gpus = [(g.name, g.bus_id, g.numa_node, g.memory_bytes.value) for g in Graph(made).gpus]
        assert gpus == [("NVIDIA H200", f"0000:00:0{bus}.0", 0, 150_754_820_096) for bus in (6, 7)]
        links = [(each.a, each.b, each.kind, each.version, each.count) for each in made.links]
        nvlinks, pcie = (("nvswitch", "nvlink", 4, 18), ("host_bridge", "pcie", 5, 16))
        assert links == [(f"gpu{i}", *link) for i in (0, 1) for link in (nvlinks, pcie)]


def test_nvlinks_between_two_gpus_are_counted_once(tmp_path):
    pair = buses(0x1B, 0x2B)
    nvml = hopper(
        2,
        links=12,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, link: 0,
        nvmlDeviceGetNvLinkRemotePciInfo=lambda handle, link: pair[1 - handle],
        nvmlDeviceGetNvLinkVersion=lambda handle, link: 5,
        nvmlDeviceGetCudaComputeCapability=(8, 0),
    )
    graph = Graph(topology.with_gpus(HOST, str(tmp_path), nvml))
    (nvlink,) = [link for link in graph.links if link.kind == "nvlink"]
    assert (nvlink.a, nvlink.b, nvlink.count, nvlink.version) == ("gpu0", "gpu1", 12, 3)
    assert nvlink.bandwidth_gbps.value == 300
    assert graph.route("gpu0", "gpu1").kinds == ("nvlink",)


def test_down_links_are_not_counted(tmp_path):
    nvml = hopper(2, nvmlDeviceGetNvLinkState=lambda handle, link: int(link != 3 or handle))
    graph = Graph(topology.with_gpus(HOST, str(tmp_path), nvml))
    nvlinks = [link for link in graph.links if link.kind == "nvlink"]
    assert [(link.count, link.version) for link in nvlinks] == [(17, 4), (18, 4)]


def test_what_nvml_does_not_tell_is_unknown(tmp_path):
    graph = Graph(topology.with_gpus(HOST, str(tmp_path), Nvml(2)))
    for gpu in graph.gpus:
        facts = (gpu.name, gpu.bus_id, gpu.numa_node, gpu.memory_bytes, gpu.bandwidth_gbps)
        assert facts == (None,) * 5 and graph.count(gpu.id, "compute_unit") is None
    assert graph.route("gpu0", "gpu1").bandwidth_gbps is None
    assert topology.with_gpus(HOST, str(tmp_path), Nvml(2)).accesses == ()

    class Absent(Nvml):
        def nvmlInit(self):
            raise self.NVMLError("Driver Not Loaded")

    assert topology.with_gpus(HOST, str(tmp_path), Absent(0)) == HOST


@pytest.mark.parametrize(
    ("told", "system", "nodes", "expected"),
    [
        # The system's word holds, then NVML's, then that the host has only one node.
        ((2, 0, 0, 0), "0", 2, 0),
        ((2, 0, 0, 0), "-1", 2, 1),
        ((0, 1, 0, 0), None, 2, 64),
        ((3, 0, 0, 0), "-1", 2, None),
        (None, "-1", 1, 0),
        (None, None, 2, None),
    ],
)
def test_a_numa_node_is_found_where_parts_are_hidden(tmp_path, told, system, nodes, expected):
    files = {f"sys/devices/system/node/node{node}/cpulist": "0\n" for node in range(nodes)}
    if system is not None:
        files["sys/bus/pci/devices/0000:1b:00.0/numa_node"] = f"{system}\n"
    nvml = hopper(1, nvmlDeviceGetMemoryAffinity=told and [told])
    machine = topology.with_gpus(HOST, write(tmp_path, files), nvml)
    assert Graph(machine).gpus[0].numa_node == expected


def test_nvml_tells_what_gpus_may_do_in_a_peers_memory(tmp_path, capsys):
    def state(one, other, index):
        # Read, write, NVLink, atomics: as two GPUs behind different PCIe bridges answer.
        return {0: 0, 1: 0, 2: 5, 3: 5}[index] if (one, other) == (0, 1) else 6 if index else 3

    machine = topology.with_gpus(HOST, str(tmp_path), hopper(3, nvmlDeviceGetP2PStatus=state))
    access = [(each.a, each.b, each.reads, each.writes, each.atomics) for each in machine.accesses]
    assert access == [
        ("gpu0", "gpu1", True, True, False),
        ("gpu0", "gpu2", False, None, None),
        ("gpu1", "gpu2", False, None, None),
    ]
    assert topology.Machine.from_json(machine.to_json()) == machine
    (told,) = topology.complaints(machine, {})
    assert told.startswith("gpu0 > gpu2 and 1 more: cannot read the peer's memory, says the driver")
    # No fault: other GPUs have no access by nature, and what a probe has measured works.
    assert topology.complaints(replace(machine, links=machine.links[1::2]), {}) == ()
    names = ("gpu0", "gpu1", "gpu2")
    works = topology.Matrix(
        what="peer_us", of="", rows=names, columns=names, values=((0.7,) * 3,) * 3, source="nvml"
    )
    assert topology.complaints(replace(machine, matrices=(works,)), {}) == ()
    (tmp_path / "sent.json").write_text(machine.to_json())
    assert cli.main(["topo", "--from", str(tmp_path / "sent.json")]) == 0
    assert re.search(r"1 +yes +yes +no\W+2 +no +unknown +unknown", capsys.readouterr().out)
    with pytest.raises(ValueError, match="access 'gpu0' - 'gpu9': device 'gpu9' is missing"):
        replace(machine, accesses=(topology.Access(a="gpu0", b="gpu9"),))


def test_without_nvml_the_driver_tells_in_procfs(tmp_path):
    files = {}
    for i, bus in enumerate(("0000:1b:00.0", "0000:2c:00.0")):
        folder, card = f"proc/driver/nvidia/gpus/{bus}", f"sys/bus/pci/devices/{bus}"
        files[f"{folder}/information"] = f"Model: \t\t NVIDIA L40S\nBus Location: \t {bus}\n"
        files[f"{card}/numa_node"] = f"{i - 1}\n"
        files[f"{card}/max_link_speed"] = "16.0 GT/s PCIe\n"
        files[f"{card}/max_link_width"] = "16\n"
    graph = Graph(topology.with_gpus(HOST, write(tmp_path, files)))
    assert [gpu.name for gpu in graph.gpus] == ["NVIDIA L40S"] * 2
    assert [gpu.numa_node for gpu in graph.gpus] == [None, 0]
    route = graph.route("gpu0", "gpu1")
    assert (route.kinds, route.bandwidth_gbps) == (("pcie", "pcie"), pytest.approx(31.504))


def test_gpus_of_both_vendors_are_numbered_on(tmp_path):
    graph = Graph(topology.with_gpus(HOST, write(tmp_path, mi300x(2)), hopper(2)))
    assert [gpu.name[:3] for gpu in graph.gpus] == ["NVI", "NVI", "AMD", "AMD"]
    assert graph.route("gpu2", "gpu3").kinds == ("xgmi",)
    assert graph.route("gpu1", "gpu2") is None


def test_discovery_is_quick(tmp_path):
    write(tmp_path, mi300x())
    best = min(_timed(lambda: topology.with_gpus(HOST, str(tmp_path), hopper(8))) for _ in range(5))
    # Required are 0.2 s on an idle machine.
    assert best < 20 * 0.2


def _timed(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
