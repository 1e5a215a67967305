"""Discovery of GPUs: from sysfs of AMD's driver, from NVML's answers, from procfs, from lstopo."""

import json
import time
from types import SimpleNamespace

import pytest

from kccl import topology
from kccl.tools import cli
from kccl.topology import Graph

HOST = topology.recorded()["intel-xeon-2-cores"]
KFD = "sys/class/kfd/kfd/topology/nodes"


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return str(root)


def lines(**values):
    return "".join(f"{name} {value}\n" for name, value in values.items())


def mi300x(gpus=8):
    """KFD's tree of a host with two NUMA nodes: nodes 0 and 1 are CPUs, the others are GPUs."""
    files = {}
    for cpu in range(2):
        files[f"{KFD}/{cpu}/gpu_id"] = "0\n"
        files[f"{KFD}/{cpu}/properties"] = lines(cpu_cores_count=96, simd_count=0, num_xcc=0)
    for i in range(gpus):
        node = f"{KFD}/{i + 2}"
        files[f"{node}/gpu_id"] = f"{28851 + i}\n"
        files[f"{node}/name"] = "ip discovery\n"
        files[f"{node}/properties"] = lines(
            **{"cpu_cores_count": 0, "simd_count": 1216, "mem_banks_count": 1},
            **{"wave_front_size": 64, "array_count": 32, "simd_per_cu": 4, "num_xcc": 8},
            **{"gfx_target_version": 90402, "vendor_id": 4098, "device_id": 0x74A1},
            **{"location_id": 0x0500 + 0x1000 * i, "domain": 0, "hive_id": 99},
        )
        files[f"{node}/mem_banks/0/properties"] = lines(
            heap_type=1, size_in_bytes=192 << 30, flags=0, width=8192, mem_clk_max=1300
        )
        targets = [(i // 4, 2, 64000)]
        targets += [(other + 2, 11, 50000) for other in range(gpus) if other != i]
        for number, (target, kind, most) in enumerate(targets):
            files[f"{node}/io_links/{number}/properties"] = lines(
                **{"type": kind, "version_major": 0, "node_from": i + 2, "node_to": target},
                **{"weight": 15 if kind == 11 else 20, "min_latency": 0, "max_latency": 0},
                **{"min_bandwidth": 50000, "max_bandwidth": most, "flags": 1},
            )
    return files


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
    """NVML with recorded answers: name -> the answer, or a list of one for each GPU, or a function.
    What is not recorded is not supported.
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
        "nvmlDeviceGetMemoryBusWidth": 6144,
        "nvmlDeviceGetMaxClockInfo": lambda handle, clock: 3201,
        "nvmlDeviceGetPciInfo": buses(*(0x1B + 16 * i for i in range(gpus))),
        "nvmlDeviceGetNumaNodeId": [i // 4 for i in range(gpus)],
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


def test_nvidia_gpus_are_told_of_by_nvml(tmp_path):
    nvml = hopper(8)
    machine = topology.with_gpus(HOST, str(tmp_path), nvml)
    graph = Graph(machine)
    assert [gpu.name for gpu in graph.gpus] == ["NVIDIA H200"] * 8
    assert graph.gpus[7].bus_id == "0000:8b:00.0" and graph.gpus[7].numa_node == 1
    assert graph.count("gpu0", "compute_unit") == 132
    assert graph.gpus[0].bandwidth_gbps.value == pytest.approx(4916.7, rel=1e-4)
    route = graph.route("gpu0", "gpu7")
    assert (route.stops, route.bandwidth_gbps) == (("gpu0", "nvswitch", "gpu7"), 450)
    assert [link.count for _, link in graph.links_of("gpu3")] == [18, 16]
    assert nvml.running == 0
    assert topology.Machine.from_json(machine.to_json()) == machine


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
    assert [link.count for link in graph.links if link.kind == "nvlink"] == [17, 18]


def test_what_nvml_does_not_tell_is_unknown(tmp_path):
    graph = Graph(topology.with_gpus(HOST, str(tmp_path), Nvml(2)))
    for gpu in graph.gpus:
        facts = (gpu.name, gpu.bus_id, gpu.numa_node, gpu.memory_bytes, gpu.bandwidth_gbps)
        assert facts == (None,) * 5 and graph.count(gpu.id, "compute_unit") is None
    assert graph.route("gpu0", "gpu1").bandwidth_gbps is None
    minus = hopper(1, nvmlDeviceGetNumaNodeId=-1)
    assert Graph(topology.with_gpus(HOST, str(tmp_path), minus)).gpus[0].numa_node is None

    class Absent(Nvml):
        def nvmlInit(self):
            raise self.NVMLError("Driver Not Loaded")

    assert topology.with_gpus(HOST, str(tmp_path), Absent(0)) == HOST


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


LSTOPO = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE topology SYSTEM "hwloc2.dtd">
<topology version="2.0">
 <object type="Machine" os_index="0" cpuset="0x0000000f" allowed_cpuset="0x00000007" \
nodeset="0x00000003" gp_index="1">
  <info name="OSRelease" value="5.14.0"/><info name="HostName" value="secret"/>
  <info name="Architecture" value="x86_64"/>
  {packages}
 </object>
 <distances2 type="NUMANode" nbobjs="2" kind="5" name="NUMALatency" indexing="os">
  <indexes length="4">0 1 </indexes><u64values length="12">10 21 21 10 </u64values>
 </distances2>
 <distances2 type="OSDev" nbobjs="2" kind="18" name="NVLinkBandwidth" indexing="gp">
  <indexes length="6">60 61 </indexes>
  <u64values length="24">1000000 450000 450000 1000000 </u64values>
 </distances2>
</topology>
"""


def lstopo():
    packages = ""
    for i in range(2):
        mask = 3 << 2 * i
        sets = f'cpuset="{mask:#010x}" nodeset="{1 << i:#010x}"'
        units = "".join(
            f'<object type="Core" os_index="{j}" cpuset="{1 << 2 * i + j:#x}">'
            f'<object type="PU" os_index="{2 * i + j}" gp_index="{30 + 2 * i + j}"/></object>'
            for j in range(2)
        )
        packages += f"""
  <object type="Package" os_index="{i}" {sets} gp_index="{3 + i}">
   <info name="CPUModel" value="Made-up CPU "/>
   <object type="NUMANode" os_index="{i}" {sets} gp_index="{10 + i}" local_memory="1048576">
   </object>
   <object type="L3Cache" {sets} gp_index="{20 + i}" cache_size="33554432" depth="3" \
cache_linesize="64" cache_type="0">{units}</object>
   <object type="Bridge" gp_index="{40 + i}" bridge_type="0-1">
    <object type="PCIDev" gp_index="{50 + i}" pci_busid="0000:{i + 1}b:00.0" \
pci_type="0302 [10de:2335] [10de:18be] a1" pci_link_speed="63.015">
     <info name="PCIDevice" value="GH100"/>
     <object type="OSDev" gp_index="{60 + i}" name="nvml{i}" subtype="NVML" osdev_type="1">
      <info name="GPUModel" value="NVIDIA H200"/>
     </object>
    </object>
    <object type="PCIDev" gp_index="{70 + i}" pci_busid="0000:{i + 1}a:00.0" \
pci_type="0207 [15b3:1021] [15b3:0041] 00"/>
   </object>
  </object>"""
    return LSTOPO.format(packages=packages)


def test_lstopo_is_read():
    machine = topology.from_hwloc(lstopo())
    assert (machine.cpu_model, machine.kernel) == ("Made-up CPU", "5.14.0")
    assert (machine.architecture, machine.memory_bytes) == ("x86_64", 2 << 20)
    assert machine.online_cpus == (0, 1, 2, 3) and machine.allowed_cpus == (0, 1, 2)
    assert (machine.num_packages, machine.num_cores) == (2, 4)
    assert machine.cpus[3] == topology.Cpu(
        id=3, core_id=1, package=1, numa_node=1, smt_siblings=(3,)
    )
    assert machine.numa_nodes[1].distances == (21, 10)
    assert machine.caches[1] == topology.Cache(
        level=3, type="unified", size_bytes=32 << 20, line_bytes=64, shared_cpus=(2, 3)
    )
    assert "secret" not in machine.to_json()
    graph = Graph(machine)
    assert [(gpu.name, gpu.bus_id, gpu.numa_node) for gpu in graph.gpus] == [
        ("NVIDIA H200", "0000:1b:00.0", 0),
        ("NVIDIA H200", "0000:2b:00.0", 1),
    ]
    assert graph.route("gpu0", "gpu1").bandwidth_gbps == 450
    # Groups of ranks need no more than this.
    cpus = [{cpu} for cpu in (0, 1, 2, 3)] * 4
    assert topology.groups(machine, cpus, 16)[0] == (0, 1, 4, 5, 8, 9, 12, 13)


def test_masks_of_many_cpus_have_several_words():
    text = lstopo().replace("0x00000007", "0x00000001,0x0,0x80000001")
    assert topology.from_hwloc(text).allowed_cpus == (0, 31, 64)
    assert topology.from_hwloc(lstopo().replace("0x00000007", "x")).allowed_cpus is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<topology", "it is not XML"),
        ("<topology/>", "version 2 or later"),
        ('<topology version="1.11"/>', "version 2 or later"),
        ('<topology version="2.0"/>', "no object of type Machine"),
        ("<html/>", "it is <html"),
        ('<!DOCTYPE t [<!ENTITY a "b">]><topology version="2.0"/>', "entities"),
    ],
)
def test_other_xml_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        topology.from_hwloc(text)


def test_a_file_is_shown_by_a_command(tmp_path, capsys):
    (tmp_path / "sent.xml").write_text(lstopo())
    assert cli.main(["topo", "--from", str(tmp_path / "sent.xml"), "--json"]) == 0
    shown = capsys.readouterr()
    assert "NVIDIA H200" in shown.err
    (tmp_path / "sent.json").write_text(shown.out)
    assert cli.main(["topo", "--from", str(tmp_path / "sent.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(shown.out)
    for name, told in (("no.xml", "No such file"), ("bad.xml", "describes no machine")):
        (tmp_path / "bad.xml").write_text("{")
        assert cli.main(["topo", "--from", str(tmp_path / name)]) == 2
        assert told in capsys.readouterr().err
