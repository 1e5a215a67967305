"""What amdsmi adds to discovery, and that its faults do not end it."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from kfd_tree import KFD, lines, mi300x, write

from kccl import topology
from kccl.backends import gpu as gpu_backend
from kccl.base.abi import lib
from kccl.topology import Graph, amd, amd_smi
from kccl.topology.accelerators import Found

HOST = topology.recorded()["intel-xeon-2-cores"]


class Smi:
    """amdsmi with answers like those of ROCm 7.0's module on MI300X, made by its source and its
    documents; nobody has recorded any. What is None is not supported.
    """

    class AmdSmiException(Exception):
        pass

    def __init__(self, **changed):
        self.running = 0
        self._answers = {
            "amdsmi_get_processor_handles": lambda: list(range(3)),
            "amdsmi_get_gpu_device_bdf": lambda gpu: f"0000:{0x05 + 0x10 * gpu:02X}:00.0",
            "amdsmi_get_gpu_asic_info": lambda gpu: {"market_name": "AMD Instinct MI300X OAM"},
            "amdsmi_get_gpu_vram_info": lambda gpu: {
                "vram_size": 196592,
                "vram_max_bandwidth": "N/A" if gpu else 5300,
            },
            "amdsmi_topo_get_numa_node_number": lambda gpu: 2**32 - 1 if gpu else 1,
            "amdsmi_is_P2P_accessible": lambda one, other: True,
            "amdsmi_topo_get_p2p_status": lambda one, other: {
                "cap": {"is_iolink_atomics_32bit": 1, "is_iolink_atomics_64bit": 1}
            },
        } | changed

    def amdsmi_init(self):
        self.running += 1

    def amdsmi_shut_down(self):
        self.running -= 1

    def __getattr__(self, name):
        if self.__dict__["_answers"].get(name) is None:

            def refuse(*given):
                raise self.AmdSmiException("not supported")

            return refuse
        return self._answers[name]


def test_amdsmi_adds_what_sysfs_hides(tmp_path):
    files = mi300x(2)
    for node in (2, 3):
        del (
            files[f"{KFD}/{node}/mem_banks/0/properties"],
            files[f"{KFD}/{node}/io_links/0/properties"],
        )
    root = write(tmp_path, files)
    smi = Smi()
    machine = topology.with_gpus(HOST, root, amdsmi=smi)
    one, other = Graph(machine).gpus
    assert one.memory_bytes == topology.Figure(value=196592 << 20, source="amdsmi")
    assert (one.bandwidth_gbps.value, other.bandwidth_gbps) == (5300, None)
    assert (one.numa_node, other.numa_node, one.name) == (1, None, "AMD Instinct MI300X")
    # The third GPU is not in sysfs: this process must not use it.
    assert machine.accesses == (
        topology.Access(a="gpu0", b="gpu1", reads=True, writes=True, atomics=True),
    )
    assert smi.running == 0
    # What sysfs tells holds; of a library that tells nothing, nothing is said.
    whole = topology.with_gpus(HOST, write(tmp_path, mi300x(2)))
    alike = topology.with_gpus(HOST, root, amdsmi=Smi(amdsmi_get_gpu_device_bdf=None))
    assert alike == whole
    silent = Smi(amdsmi_is_P2P_accessible=None, amdsmi_topo_get_p2p_status=None)
    assert topology.with_gpus(HOST, root, amdsmi=silent).accesses == ()
    assert Graph(topology.with_gpus(HOST, root, amdsmi=smi)).gpus == Graph(whole).gpus

    class Absent(Smi):
        def amdsmi_init(self):
            raise self.AmdSmiException("no driver")

    assert topology.with_gpus(HOST, root, amdsmi=Absent()) == whole


def refusing(error):
    def refuse(*given):
        raise error

    return refuse


@pytest.mark.parametrize("error", [KeyError("vram"), ValueError("enum 7"), TypeError(), OSError()])
def test_a_library_that_fails_does_not_end_discovery(tmp_path, error):
    root = write(tmp_path, mi300x(2))
    whole = topology.with_gpus(HOST, root)
    asked = [name for name in Smi()._answers if name != "amdsmi_get_gpu_device_bdf"]
    broken = Smi(**dict.fromkeys(asked[1:], refusing(error)))
    broken.amdsmi_shut_down = refusing(error)
    assert Graph(topology.with_gpus(HOST, root, amdsmi=broken)).gpus == Graph(whole).gpus
    broken.amdsmi_init = refusing(error)
    assert topology.with_gpus(HOST, root, amdsmi=broken) == whole
    # Another module of this name, and a library whose import fails.
    assert topology.with_gpus(HOST, root, amdsmi=SimpleNamespace()) == whole


def test_answers_of_amdsmi_that_are_no_answers_are_unknown(tmp_path):
    files = {path: text for path, text in mi300x(2).items() if "mem_banks" not in path}
    nothing = {name: lambda *given: "N/A" for name in Smi()._answers if "_get_gpu_" in name}
    del nothing["amdsmi_get_gpu_device_bdf"]
    unknown = {"is_iolink_atomics_32bit": 255, "is_iolink_atomics_64bit": 1}
    nothing["amdsmi_topo_get_p2p_status"] = lambda one, other: {"cap": unknown}
    machine = topology.with_gpus(HOST, write(tmp_path, files), amdsmi=Smi(**nothing))
    assert all(gpu.memory_bytes is None for gpu in Graph(machine).gpus)
    assert Graph(machine).gpus[0].name == "AMD Instinct MI300X"
    assert [each.atomics for each in machine.accesses] == [None]


def test_a_partition_does_not_have_the_memory_of_the_card():
    one = topology.Device(id="gpu0", kind="gpu", bus_id="0000:05:00.0")
    other = replace(one, id="gpu1", bus_id="0000:05:00.1")
    whole = amd_smi.completed(Found(devices=(one,)), Smi()).devices
    parts = amd_smi.completed(Found(devices=(one, other)), Smi()).devices
    assert whole[0].memory_bytes is not None
    assert [gpu.memory_bytes for gpu in parts] == [None, None]


@pytest.mark.parametrize(
    ("changed", "number"),
    [
        ({}, 8),
        ({"num_xcc": 1}, 1),
        ({"num_xcc": 16}, lib.kKcclGridCounters),
        # More dies than compute units.
        ({"simd_count": 4}, None),
    ],
)
def test_a_rank_that_starts_reads_the_dies_from_sysfs_alone(
    tmp_path, monkeypatch, capsys, changed, number
):
    """amdsmi prints when it is imported without its library, and what it says is not needed."""
    facts = {"simd_count": 1216, "simd_per_cu": 4, "num_xcc": 8} | changed
    files = mi300x(1) | {f"{KFD}/2/properties": lines(**facts)}
    module = 'print("Unable to find libamd_smi.so")\nraise RuntimeError("amdsmi")\n'
    root = write(tmp_path, files | {"amdsmi.py": module})
    monkeypatch.setattr(amd, "_NODES", f"{root}/{KFD}")
    monkeypatch.syspath_prepend(root)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    monkeypatch.setattr(gpu_backend.driver, "table", lambda: SimpleNamespace(backend="hip"))
    assert gpu_backend._grid_counters("topology") == number
    assert gpu_backend._grid_counters("flat") == 1
    told = capsys.readouterr()
    assert told.out == told.err == ""
