"""Which file may use which: the layers of csrc and kccl as tables, compared with the source."""

import re
from pathlib import Path

import pytest
from source_tree import (
    ROOT,
    include_graph,
    python_files,
    python_imports,
    source_files,
    without_comments,
)

import kccl
from kccl.backends.base import Backend
from kccl.backends.gpu import GpuBackend
from kccl.backends.host import HostBackend
from kccl.backends.sim import SimBackend

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
    "payload.cuh": {"coop.cuh"},
    "ll16.cuh": {"payload.cuh", "window.cuh"},
    "reduce.cuh": {"payload.cuh"},
    "description.cuh": {"window.cuh"},
    "together.cuh": {"coop.cuh"},
    "wait.cuh": {"together.cuh", "description.cuh"},
    "barrier.cuh": {"wait.cuh"},
    "refuse.cuh": {"wait.cuh"},
    "told.cuh": {"coop.cuh"},
    "one_sided.cuh": {"refuse.cuh", "told.cuh"},
    "grid.cuh": {"refuse.cuh"},
    "meeting.cuh": {"coop.cuh"},
    "ring.cuh": {"wait.cuh"},
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
    "same_call.cuh": {"channel.cuh"},
}
GUIDE = (ROOT / "csrc/README.md").read_text()
KERNELS = {name_of(path) for path in (HEADERS / "kernels").iterdir()}
FOR_KERNELS = {"wait.cuh", "one_sided.cuh", "channel.cuh", "grid.cuh", "sentinel.cuh", "rounds.cuh"}
FOR_KERNELS |= {"exchange.cuh", "payload.cuh", "publish.cuh", "reduce.cuh", "same_call.cuh"}
# A kernel that calls another when it finds, on all ranks alike, that it cannot run.
FALLS_BACK_TO = {
    "kernels/all_reduce_two_shot_cma_simple.cuh": {"kernels/all_reduce_two_shot_pull_simple.cuh"}
}
# What the host core includes beside its own folder; the build writes its kernel_table.inc.
FOR_HOST = {"abi.h", "device_comm.h", "targets/host_idle.h", "kccl.cuh", "mem.cuh"}
FOR_HOST |= {"reduce.cuh", "wait.cuh", "host/kernel_table.inc", "sim/entries.inc"}
# The simulator runs the calls that the host binds.
# It compares its numbers with those of together.cuh.
FOR_SIM = {"abi.h", "together.cuh", "targets/host_floats.h", "targets/sim_device.h", "host/api.inc"}


def may_include(name: str) -> set[str]:
    """What a file of csrc may include; both as name_of() gives them."""
    folder = name.rpartition("/")[0]
    if folder == "kernels":
        return FOR_KERNELS | FALLS_BACK_TO.get(name, set())
    if name == "collectives.cuh":
        return KERNELS | {"grid.cuh"}
    if name == "kccl.cuh":
        # It also includes what no kernel of the library needs.
        return KERNELS | {"meeting.cuh", "ring.cuh", "collectives.cuh"}
    if folder == "sim/cuda":
        return {name_of(path) for path in (CSRC / folder).iterdir()} | {"mem.cuh"}
    if folder in ("host", "sim"):
        own = {name_of(path) for path in (CSRC / folder).iterdir()}
        return own | (FOR_HOST if folder == "host" else FOR_SIM)
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
    row = r"^\| `include/kccl/([\w*/]+)\.(?:cuh|h|hpp|inc)` \|.*\| ([\w, ]+) \|$"
    listed = {
        name.removesuffix("/*"): set() if cell == "nothing" else set(cell.split(", "))
        for name, cell in re.findall(row, GUIDE, re.MULTILINE)
    }
    one = "kernels/barrier_direct.cuh"  # of the kernels, which have one row
    headers = {*INCLUDES, "collectives.cuh", "kccl.cuh", one} - {"abi.h"}
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
    return "kernels" if name.startswith("kernels/") else Path(name).stem


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


# ---- kccl: which module may import which -------------------------------------------------------

# The folders of kccl, lowest first: a module imports from its own folder and from those below it.
# The files at the top of kccl count as one folder.
TOP = "the top of kccl"
TOP_FILES = {"__init__", "__main__", "comm", "start", "module"}
ROOMS = ("base", "jit", "plan", "ranks", "gpu", "sim", "backends", "collectives", TOP)
ROOMS += ("interop", "tools")
# Beside these: symbolic links to top-level folders. bench and engine see public names only, and
# only commands start them; topology knows nothing of kccl, and everyone may use it.
BESIDE = ("bench", "engine", "topology")
# The command and lazy names load what lies above them, when they are used.
MAY_REACH_UP = {"__main__", "__init__"}
# The two modules of the compiled core, which belong to no folder.
CORE = ("kccl._core", "kccl._fastcall")
# The communicator's parts whose names begin with an underscore.
PRIVATE = re.compile(r"\w*comm\w*\.(_[a-z]\w*)")


def room_of(module: str) -> str:
    """The folder of a module, given as in "plan.choice"; names of kccl itself are at its top."""
    first = module.split(".")[0]
    return first if first in ROOMS or first in BESIDE else TOP


def test_kccl_imports_only_downwards():
    for path in python_files("kccl"):
        parts = path.relative_to(ROOT / "kccl").with_suffix("").parts
        module = ".".join(parts)
        if module in MAY_REACH_UP:
            continue
        room = room_of(module)
        if len(parts) > 1:
            assert parts[0] in ROOMS, f"{path}: add {parts[0]} to ROOMS"
        for name, when in python_imports(path):
            if not name.startswith("kccl.") or name in CORE:
                continue
            below = room_of(name.removeprefix("kccl."))
            if below in BESIDE:
                assert below == "topology" or room == "tools", f"{module} imports {name}"
            else:
                assert ROOMS.index(below) <= ROOMS.index(room), f"{module} imports {name} ({when})"


def test_the_top_of_kccl_has_only_what_a_reader_meets_first():
    assert {path.stem for path in (ROOT / "kccl").glob("*.py")} == TOP_FILES


def test_the_path_of_a_call_names_files_that_exist():
    head = (ROOT / "kccl/comm.py").read_text().split('"""')[1]
    named = set(re.findall(r"[\w/]+\.(?:py|cpp|cuh)\b", head))
    assert len(named) > 20
    for name in named:
        assert any((folder / name).is_file() for folder in (ROOT, ROOT / "kccl", HEADERS)), name


@pytest.mark.parametrize("folder", ["kccl", "bench", "engine", "examples"])
def test_only_the_communicator_uses_its_private_names(folder):
    for path in python_files(folder):
        used = PRIVATE.findall(path.read_text())
        assert path == ROOT / "kccl/comm.py" or not used, f"{path.relative_to(ROOT)} uses {used}"


def test_backends_are_siblings_behind_a_pure_interface():
    methods = {name for name, value in vars(Backend).items() if callable(value)}
    assert methods == Backend.__abstractmethods__ and len(methods) > 15
    for each in (HostBackend, SimBackend, GpuBackend):
        assert each.__bases__ == (Backend,) and each.__abstractmethods__ == frozenset()
    incomplete = type("Incomplete", (HostBackend,), {"clear": Backend.clear})
    with pytest.raises(TypeError, match=r"abstract method '?clear"):
        incomplete(None, None, shares_cores=False, are_threads=True, timeout=1)


# ---- engine and bench: the same ------------------------------------------------------------------

# As ROOMS. `generate`, a command, lies above what commands share.
ROOMS_OF_ENGINE = ("base", "model", "text", "files", "monokernel", "executors", "", "commands")
TOP_OF_ENGINE = {"__init__", "api", "diff", "generate"}


def test_the_engine_imports_only_downwards():
    def room_of(module: str) -> int:
        parts = module.split(".")
        if module == "generate":
            return len(ROOMS_OF_ENGINE)
        return ROOMS_OF_ENGINE.index(parts[0] if parts[0] in ROOMS_OF_ENGINE else "")

    for path in python_files("engine"):
        module = ".".join(path.relative_to(ROOT / "engine").with_suffix("").parts)
        if "." in module:
            assert module.split(".")[0] in ROOMS_OF_ENGINE, f"add {module} to ROOMS_OF_ENGINE"
        for name, when in python_imports(path):
            if name.startswith("kccl.engine."):
                below = name.removeprefix("kccl.engine.")
                assert room_of(below) <= room_of(module), f"{module} imports {name} ({when})"


def test_the_top_of_the_engine_has_only_what_a_reader_meets_first():
    assert {path.stem for path in (ROOT / "engine").glob("*.py")} == TOP_OF_ENGINE


@pytest.mark.parametrize("folder", ["bench", "engine"])
def test_modules_import_each_other_in_no_circle(folder):
    left = {}
    for path in python_files(folder):
        module = ".".join(("kccl", *path.relative_to(ROOT).with_suffix("").parts))
        names = {name for name, when in python_imports(path) if when != "annotation"}
        left[module.removesuffix(".__init__")] = names
    while free := [module for module, names in left.items() if not names & left.keys() - {module}]:
        for module in free:
            del left[module]
    assert left == {}


# The drivers' own names: functions, types, constants, libraries and packages.
OF_NVIDIA = r"\bcu[A-Z]\w+|\bCU[a-z]\w+|\bCU_[A-Z]\w+|\bCUDA_(?!VISIBLE)\w+|\bcuda\.bindings"
OF_NVIDIA += r"|\bkDLCUDA"
OF_AMD = r"\bhip[A-Z]\w+|\bHIP_(?!VISIBLE)\w+|\blibamdhip\w+|\bkDLROCM"
# A driver's names -> the modules that may contain them, and which; None: all. nvrtc.py imports the
# compiler.
SAY_THEM = {
    OF_NVIDIA: {"gpu/cuda.py": None, "jit/nvrtc.py": {"cuda.bindings"}},
    OF_AMD: {"gpu/hip.py": None, "jit/hiprtc.py": {"hipRTC"}},
}


@pytest.mark.parametrize(("names", "least"), [(OF_NVIDIA, 60), (OF_AMD, 3)])
def test_a_drivers_names_stand_in_one_module(names, least):
    (own,) = (where for where, allowed in SAY_THEM[names].items() if allowed is None)
    assert len(set(re.findall(names, (ROOT / "kccl" / own).read_text()))) >= least
    for path in python_files("kccl"):
        where = path.relative_to(ROOT / "kccl").as_posix()
        found = set(re.findall(names, path.read_text()))
        allowed = SAY_THEM[names].get(where, set())
        assert allowed is None or found <= allowed, f"kccl/{where}: {found}"


def test_topology_imports_nothing_of_kccl():
    for path in python_files("topology"):
        for name, _ in python_imports(path):
            assert name.startswith("kccl.topology.") or name.split(".")[0] != "kccl", path.name


@pytest.mark.parametrize("folder", ["bench", "engine", "examples"])
def test_users_of_kccl_see_its_public_names_only(folder):
    public = {*kccl.__all__, "bench", "engine", "interop"}
    for path in python_files(folder):
        if path.match("engine/base/core.py"):
            # The engine's own C++ is compiled into the core.
            continue
        for name, _ in python_imports(path):
            parts = name.split(".")
            if parts[0] == "kccl" and len(parts) > 1:
                assert parts[1] in public, f"{path.name} imports {name}"
        text = path.read_text()
        used = set(re.findall(r"(?<![.\w/])kccl\.(\w+)", text)) - {"cuh"}
        assert used <= public, f"{path.name} uses kccl.{used - public}"


# These may import torch at their top: only programs that use torch import them.
ON_TORCH = {
    path.relative_to(ROOT).as_posix()
    for folder in ("kccl/interop", "bench/decode/pytorch")
    for path in python_files(folder)
}
# Big library -> the files that may import it, and only inside a function.
LAZY_ONLY = {
    "mpi4py": {"kccl/ranks/bootstrap.py", "bench/peers/baselines.py", "bench/peers/mpi_job.py"},
    "torch": {*ON_TORCH, "bench/decode/peers.py", "bench/peers/torch.py"},
    "matplotlib": {
        "bench/decode/picture.py",
        "bench/harness/outputs.py",
        "bench/plot.py",
        "topology/heatmap.py",
    },
    # The engine loads these through extras.py.
    **{name: set() for name in ("safetensors", "gguf", "tokenizers", "jinja2")},
    "rich": None,  # anywhere
}


@pytest.mark.parametrize("library", LAZY_ONLY)
def test_big_libraries_are_imported_lazily(library):
    allowed = LAZY_ONLY[library]
    for folder in ("kccl", "bench", "engine", "topology"):
        for path in python_files(folder):
            where = path.relative_to(ROOT).as_posix()
            for name, when in python_imports(path):
                if name.split(".")[0] != library or when == "annotation":
                    continue
                is_lazy = when == "function" or where in ON_TORCH
                assert is_lazy, f"{where} imports {name} when it is imported"
                assert allowed is None or where in allowed, f"{where} imports {name}"


def test_one_file_knows_windows():
    """Whether there is one, how wide it is, and what may be drawn in it."""
    known = re.compile(
        r"get_terminal_size|\bConsole\(|is_dumb_terminal|show_cursor|NO_COLOR|\[\?25"
    )
    for folder in ("kccl", "bench", "engine"):
        for path in python_files(folder):
            found = known.findall(path.read_text())
            assert path.match("kccl/tools/screen.py") or not found, f"{path.name} has {found}"


def test_one_file_pins():
    for folder in ("kccl", "bench", "engine", "topology"):
        for path in python_files(folder):
            pins = "sched_setaffinity(" in path.read_text()
            assert path.match("topology/pinning.py") or not pins, path.name
