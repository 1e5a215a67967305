"""Machines in the XML of lstopo, and in files that somebody sent."""

import json

import pytest

from kccl import topology
from kccl.tools import cli
from kccl.topology import Graph

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
