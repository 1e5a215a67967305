"""Which module may import which: the rooms of kccl, engine and bench, compared with the source."""

import re
import subprocess
import sys

import pytest
from source_tree import ROOT, python_files, python_imports

import kccl
from kccl.backends.base import Backend
from kccl.backends.gpu import GpuBackend
from kccl.backends.host import HostBackend
from kccl.backends.on_gpu import OnGpu
from kccl.backends.sim import SimBackend
from kccl.backends.staged import StagedBackend

HEADERS = ROOT / "csrc/include/kccl"

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
    for each in (HostBackend, SimBackend):
        assert each.__bases__ == (Backend,) and each.__abstractmethods__ == frozenset()
    for each in (GpuBackend, StagedBackend):
        assert each.__bases__ == (OnGpu,) and each.__abstractmethods__ == frozenset()
    assert OnGpu.__bases__ == (Backend,) and OnGpu.__abstractmethods__
    incomplete = type("Incomplete", (HostBackend,), {"clear": Backend.clear})
    with pytest.raises(TypeError, match=r"abstract method '?clear"):
        incomplete(None, None, shares_cores=False, are_threads=True, timeout=1)


# ---- engine and bench: the same ------------------------------------------------------------------

# As ROOMS; a folder in a folder may be a room of its own. The commands at the top lie above all.
ROOMS_OF_ENGINE = (
    "base",
    "formats",
    "model",
    "text",
    "files",
    "monokernel",
    "executors",
    "serving",
    "",
    "commands",
    "serving.http",
)
COMMANDS_OF_ENGINE = {"chat", "generate", "serve"}
TOP_OF_ENGINE = {"__init__", "api", "diff"} | COMMANDS_OF_ENGINE


def test_the_engine_imports_only_downwards():
    def room_of(module: str) -> int:
        parts = module.split(".")
        if module in COMMANDS_OF_ENGINE:
            return len(ROOMS_OF_ENGINE)
        room = next(
            (each for each in (".".join(parts[:2]), parts[0]) if each in ROOMS_OF_ENGINE), ""
        )
        return ROOMS_OF_ENGINE.index(room)

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


@pytest.mark.parametrize("folder", ["bench", "engine", "kccl/ranks"])
def test_modules_import_each_other_in_no_circle(folder):
    left = {}
    for path in python_files(folder):
        parts = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts if parts[0] == "kccl" else ("kccl", *parts))
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
    OF_NVIDIA: {
        "gpu/cuda.py": None,
        "jit/nvrtc.py": {"cuda.bindings"},
        # Where a toolkit's headers are.
        "interop/nccl_headers.py": {"CUDA_HOME"},
    },
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
# These may import mpi4py at their top, likewise.
OF_MPI = ("mpi", "mpi_calls", "mpi_communicator", "mpi_errors", "mpi_messages", "mpi_opening")
OF_MPI += ("mpi_types",)
# Big library -> the files that may import it, and only inside a function.
LAZY_ONLY = {
    "mpi4py": {
        "kccl/ranks/mpi_ranks.py",
        "kccl/ranks/mpi.py",
        *(f"kccl/interop/{name}.py" for name in OF_MPI),
        "bench/peers/baselines.py",
        "bench/peers/mpi_job.py",
    },
    "torch": {*ON_TORCH, "bench/decode/peers.py", "bench/gloo.py", "bench/peers/torch.py"},
    "matplotlib": {
        "bench/decode/picture.py",
        "bench/harness/outputs.py",
        "bench/plot.py",
        "topology/curves.py",
        "topology/drawing.py",
        "topology/heatmap.py",
    },
    # The engine loads these through extras.py.
    **{name: set() for name in ("safetensors", "gguf", "tokenizers", "jinja2", "llguidance")},
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


def test_the_build_imports_no_package_but_cffi():
    """A new environment has only what builds KCCL while the core is compiled."""
    program = """
import sys
sys.modules |= dict.fromkeys(("numpy", "mpi4py", "rich", "torch", "ml_dtypes"))
from kccl.csrc.host.kernel_table import kernel_table
assert kernel_table()
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
