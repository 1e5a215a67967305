"""Which file may use which: the layers of csrc as a table, compared with the source."""

import re
from pathlib import Path

import pytest
from source_tree import (
    ROOT,
    include_graph,
    source_files,
    without_comments,
)

# ---- csrc: which header may include which ------------------------------------------------------

CSRC = ROOT / "csrc"
HEADERS = CSRC / "include/kccl"


def name_of(path: Path) -> str:
    """A file of csrc as the tables name it: as in "kernels/wait.cuh", "wait.cuh", "host/host.h"."""
    return path.relative_to(HEADERS if path.is_relative_to(HEADERS) else CSRC).as_posix()


# The targets' parts of mem.cuh, which includes one of them.
MEM = {"mem_cuda.cuh", "mem_hip.cuh", "mem_host.cuh", "mem_sim.cuh", "mem_copies.cuh"}
MEM |= {"mem_mailbox.cuh", "cuda_words.h"}
PLATFORM = ("sim_device", "sim_cuda", "host_floats", "host_grid")
# Names as name_of() gives them.
INCLUDES = {
    # The host's side of a wait, and the simulator's of every access.
    "targets/host_idle.h": set(),
    # How the host's threads round, and the simulator's.
    "targets/host_floats.h": set(),
    # Where the host's blocks stand in their grid.
    "targets/host_grid.h": set(),
    "targets/sim_device.h": set(),
    "targets/sim_cuda.h": set(),
    "platform.cuh": {f"targets/{each}.h" for each in PLATFORM},
    "abi.inc": set(),
    "abi.h": {"platform.cuh", "abi.inc"},
    "mem.cuh": {"abi.h", *(f"targets/{name}" for name in MEM)},
    "targets/mem_cpu.cuh": set(),
    "targets/mem_cuda.cuh": set(),
    "targets/mem_hip.cuh": set(),
    "targets/mem_mailbox.cuh": set(),
    "targets/mem_host.cuh": {"targets/mem_cpu.cuh", "targets/host_idle.h"},
    "targets/mem_sim.cuh": {"targets/mem_cpu.cuh", "targets/sim_device.h"},
    "targets/mem_copies.cuh": set(),
    "targets/cuda_words.h": set(),
    # For programs without Python; device code needs none of these.
    "device_comm.h": {"abi.h"},
    "host_team.hpp": {"abi.h"},
    "record.hpp": {"abi.h"},
    "host.hpp": {"device_comm.h", "host_team.hpp", "record.hpp"},
    "cpu.hpp": {"device_comm.h", "kccl.cuh", "record.hpp"},
    "coop.cuh": {"mem.cuh"},
    "window.cuh": {"mem.cuh"},
    "messages.cuh": {"device_comm.h", "window.cuh"},
    "postings.cuh": {"mem.cuh"},
    "payload.cuh": {"coop.cuh"},
    "ll16.cuh": {"payload.cuh", "window.cuh"},
    "float8.cuh": {"mem.cuh"},
    "types.cuh": {"float8.cuh"},
    "operators.cuh": {"types.cuh"},
    "reduce.cuh": {"operators.cuh", "payload.cuh"},
    "norm.cuh": {"reduce.cuh"},
    "columns.cuh": {"norm.cuh"},
    "description.cuh": {"window.cuh"},
    "together.cuh": {"coop.cuh"},
    "wait.cuh": {"together.cuh", "description.cuh"},
    "barrier.cuh": {"wait.cuh"},
    "refuse.cuh": {"wait.cuh"},
    "told.cuh": {"coop.cuh"},
    "one_sided.cuh": {"refuse.cuh", "told.cuh"},
    "grid.cuh": {"refuse.cuh"},
    "meeting.cuh": {"coop.cuh"},
    "ring.cuh": {"told.cuh", "wait.cuh"},
    "grid_exchange.cuh": {"barrier.cuh", "grid.cuh", "ll16.cuh", "told.cuh"},
    "publish.cuh": {"grid_exchange.cuh", "reduce.cuh"},
    "scrub.cuh": {"barrier.cuh", "payload.cuh"},
    "failure_latch.cuh": {"refuse.cuh"},
    "dependent_launch.cuh": {"coop.cuh"},
    "credited_call.cuh": {"wait.cuh"},
    "opening.cuh": {"refuse.cuh"},
    "channel.cuh": {
        "credited_call.cuh",
        "dependent_launch.cuh",
        "failure_latch.cuh",
        "opening.cuh",
        "scrub.cuh",
        "told.cuh",
    },
    "exchange.cuh": {"channel.cuh", "ll16.cuh"},
    "sentinel.cuh": {"channel.cuh"},
    "rounds.cuh": {"channel.cuh"},
    "pipes.cuh": {"ll16.cuh", "rounds.cuh"},
    "any_source.cuh": {"pipes.cuh"},
    "parts.cuh": {"exchange.cuh", "rounds.cuh"},
    "same_call.cuh": {"channel.cuh"},
    "one_call.cuh": {"channel.cuh", "grid.cuh", "payload.cuh", "reduce.cuh"},
    "experts.cuh": {"exchange.cuh", "one_call.cuh"},
    "dispatch.cuh": {"experts.cuh"},
    "combine.cuh": {"experts.cuh"},
}
GUIDE = (ROOT / "csrc/README.md").read_text()
KERNELS = {name_of(path) for path in (HEADERS / "kernels").iterdir()}
COLLECTIVES = {name_of(path) for path in (HEADERS / "collectives").iterdir()}
FOR_KERNELS = {"wait.cuh", "one_sided.cuh", "channel.cuh", "grid.cuh", "sentinel.cuh", "rounds.cuh"}
FOR_KERNELS |= {"exchange.cuh", "parts.cuh", "payload.cuh", "publish.cuh", "reduce.cuh"}
FOR_KERNELS |= {"any_source.cuh", "same_call.cuh", "columns.cuh"}
# A kernel that calls another when it finds, on all ranks alike, that it cannot run.
FALLS_BACK_TO = {
    "kernels/all_reduce_two_shot_cma_simple.cuh": {"kernels/all_reduce_two_shot_pull_simple.cuh"}
}
# What the host core includes beside its own folder; the build writes its kernel_table.inc.
FOR_HOST = {"abi.h", "device_comm.h", "targets/host_idle.h", "kccl.cuh", "mem.cuh"}
FOR_HOST |= {"messages.cuh", "payload.cuh", "postings.cuh", "reduce.cuh", "wait.cuh"}
FOR_HOST |= {"host/kernel_table.inc", "sim/entries.inc"}
# libkccl_nccl.so launches as the host core does, and sets up memory as programs without Python do.
FOR_NCCL = {"abi.h", "host_team.hpp", "host.hpp", "host/host.h", "host/cuda_driver.h"}
# What its build writes (kccl/interop/nccl.py).
WRITTEN = ("driver", "forwards", "image_bytes", "images", "plan", "sizes")
FOR_NCCL |= {f"nccl/{name}.inc" for name in WRITTEN}
# The simulator runs the calls that the host binds.
# It compares its numbers with those of together.cuh.
FOR_SIM = {"abi.h", "together.cuh", "targets/host_floats.h", "targets/sim_device.h", "host/api.inc"}


def may_include(name: str) -> set[str]:
    """What a file of csrc may include; both as name_of() gives them."""
    folder = name.rpartition("/")[0]
    if folder == "kernels":
        return FOR_KERNELS | FALLS_BACK_TO.get(name, set())
    if folder == "collectives":
        return KERNELS | {"one_call.cuh"}
    if name == "collectives.cuh":
        return COLLECTIVES
    if name == "kccl.cuh":
        # It also includes what no kernel of the library needs.
        beside = {"collectives.cuh", "combine.cuh", "dispatch.cuh", "meeting.cuh", "ring.cuh"}
        return KERNELS | beside
    if folder == "sim/cuda":
        return {name_of(path) for path in (CSRC / folder).iterdir()} | {"mem.cuh"}
    beside = {"host": FOR_HOST, "sim": FOR_SIM, "nccl": FOR_NCCL, "nccl/cuda": set()}
    if folder in beside:
        return {name_of(path) for path in (CSRC / folder).iterdir()} | beside[folder]
    assert name in INCLUDES, f"{name}: give it a line in INCLUDES"
    return INCLUDES[name]


def test_the_public_headers_are_self_contained():
    """The folder that users give to their compiler with -I has every file that is included."""
    for path in source_files("csrc/include", "cuh", "h", "hpp", "inc"):
        for target in re.findall(r'^\s*#include "([^"]+)"', path.read_text(), re.MULTILINE):
            included = (path.parent / target).resolve()
            assert included.is_file(), f"{path.relative_to(ROOT)} includes {target}"
            assert included.is_relative_to(ROOT / "csrc/include/kccl"), path.relative_to(ROOT)


def test_the_guide_to_csrc_names_the_same_layers():
    """It lists the headers in an order in which each includes only those above it."""
    row = r"^\| `include/kccl/([\w*/]+)\.(?:cuh|h|hpp|inc)` \|.*\| ([\w, /*]+) \|$"
    listed = {
        name: set() if cell == "nothing" else set(cell.split(", "))
        for name, cell in re.findall(row, GUIDE, re.MULTILINE)
    }
    # The kernels have one row, and so have the collectives.
    of_folders = {"kernels/barrier_direct.cuh", "collectives/barrier.cuh"}
    headers = {*INCLUDES, "collectives.cuh", "kccl.cuh", *of_folders} - {"abi.h"}
    wanted = {
        _row(name): {_row(each) for each in may_include(name) if "targets/" not in each}
        for name in headers
        if "targets/" not in name
    }
    assert listed == wanted
    order = list(listed)
    for name, included in listed.items():
        assert all(order.index(each) < order.index(name) for each in included), name


def _row(name: str) -> str:
    folder = name.rpartition("/")[0]
    return f"{folder}/*" if folder in ("kernels", "collectives") else Path(name).stem


def test_csrc_includes_only_what_lies_below():
    graph = include_graph()
    assert set(INCLUDES) <= {name_of(path) for path in graph}
    for path, included in graph.items():
        wrong = {name_of(each) for each in included} - may_include(name_of(path))
        assert not wrong, f"{path.relative_to(ROOT)} includes {wrong}"


@pytest.mark.parametrize("name", ["wait.cuh", "grid_exchange.cuh"])
def test_headers_and_kernels_of_one_name_are_told_apart(name):
    """A kernel may include the header of its own name; no header may include the kernel."""
    included = include_graph()[HEADERS / "kccl.cuh"]
    assert HEADERS / "kernels" / name in included and HEADERS / name not in included
    assert all(f"kernels/{name}" not in allowed for allowed in INCLUDES.values())
    assert f"kernels/{name}" not in may_include(f"kernels/{name}")


# What only the targets' parts of mem.cuh may contain -> other files, and what they may contain.
ONLY_IN_MEM = {
    r"\basm\b": {},
    r"\b__atomic_\w+": {
        "probe.cpp": {"__atomic_signal_fence"},
        # The simulated memory itself, which the ranks' host threads share.
        "accesses.cpp": {"__atomic_store_n"},
        "memory.h": {"__atomic_load_n"},
    },
    # Below mem.cuh: AMD has no block-wide vote, so waves leave theirs in shared memory.
    r"\b__scoped_atomic_\w+": {
        "platform.cuh": {"__scoped_atomic_store_n", "__scoped_atomic_load_n"}
    },
    r"\bvolatile\b": {},
}


@pytest.mark.parametrize("pattern", ONLY_IN_MEM)
def test_instructions_live_in_mem(pattern):
    elsewhere = ONLY_IN_MEM[pattern]
    for path in source_files("csrc", "cuh", "h", "hpp", "inc", "cpp"):
        if path.name in MEM:
            continue
        found = set(re.findall(pattern, without_comments(path)))
        assert found <= elsewhere.get(path.name, set()), f"{path.relative_to(ROOT)}: {found}"


def test_volatile_is_a_property_of_assembly_only():
    for name in MEM:
        text = without_comments(ROOT / "csrc/include/kccl/targets" / name)
        # keep() of mem_cuda.cuh has it as part of two instructions.
        assert re.findall(r"(?<!asm )(?<!(?:st|ld)\.)\bvolatile\b", text) == []


def test_the_simulators_stacks_are_switched_in_one_file():
    for path in source_files("csrc", "cuh", "h", "hpp", "inc", "cpp"):
        # The watchdog asks where a signal has interrupted a kernel.
        if path.stem in ("fiber", "watchdog"):
            continue
        found = re.findall(r"\b\w*(?:ucontext|setjmp|longjmp|jmp_buf)\w*", without_comments(path))
        assert not found, f"{path.relative_to(ROOT)}: {found}"
