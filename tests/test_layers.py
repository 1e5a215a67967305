"""Who may use what: the layers of csrc and kccl as tables, held against the text of the source."""

import re
from pathlib import Path

import pytest
from source_tree import (
    ROOT,
    identifiers,
    include_graph,
    python_files,
    python_imports,
    source_files,
    without_comments,
)

import kccl

# ---- csrc: which header may include which ------------------------------------------------------

# The targets' parts of mem.cuh, which includes one of them.
MEM = {"mem_cuda.cuh", "mem_hip.cuh", "mem_host.cuh", "mem_sim.cuh", "mem_copies.cuh"}
INCLUDES = {
    # The host's side of a wait, and the simulator's of every access.
    "idle.h": set(),
    "device.h": set(),
    "platform.cuh": {"device.h"},
    "abi.inc": set(),
    "abi.h": {"platform.cuh", "abi.inc"},
    "mem.cuh": {"abi.h", *MEM},
    "mem_cpu.cuh": set(),
    "mem_cuda.cuh": set(),
    "mem_hip.cuh": set(),
    "mem_host.cuh": {"mem_cpu.cuh", "idle.h"},
    "mem_sim.cuh": {"mem_cpu.cuh", "device.h"},
    "mem_copies.cuh": set(),
    # For programs without Python; device code needs none of these.
    "layout.h": {"abi.h"},
    "host_team.hpp": {"abi.h"},
    "host.hpp": {"host_team.hpp", "layout.h"},
    "coop.cuh": {"mem.cuh"},
    "window.cuh": {"mem.cuh"},
    "payload.cuh": {"coop.cuh"},
    "packet.cuh": {"payload.cuh", "window.cuh"},
    "reduce.cuh": {"payload.cuh"},
    "signal.cuh": {"coop.cuh", "window.cuh"},
    "barrier.cuh": {"signal.cuh"},
    "grid.cuh": {"signal.cuh"},
    "stage.cuh": {"signal.cuh"},
    "grid_exchange.cuh": {"barrier.cuh", "grid.cuh", "packet.cuh"},
    "publish.cuh": {"grid_exchange.cuh", "reduce.cuh"},
    "channel.cuh": {"barrier.cuh", "payload.cuh"},
    "exchange.cuh": {"channel.cuh", "packet.cuh"},
    "sentinel.cuh": {"channel.cuh"},
    "staging.cuh": {"channel.cuh"},
}
GUIDE = (ROOT / "csrc/README.md").read_text()
FOR_KERNELS = {"signal.cuh", "channel.cuh", "grid.cuh", "sentinel.cuh", "staging.cuh"}
FOR_KERNELS |= {"exchange.cuh", "payload.cuh", "publish.cuh", "reduce.cuh"}
# A kernel that hands over to another where it finds, on all ranks alike, that it cannot run.
FALLS_BACK_TO = {"all_reduce_two_shot_cma_simple": {"all_reduce_two_shot_pull_simple.cuh"}}
FOR_HOST = {
    "abi.h",
    "api.inc",
    "cuda_driver.h",
    "fastcall.h",
    "host.h",
    "idle.h",
    "kccl.cuh",
    "kernel_table.inc",
    "layout.h",
    "mem.cuh",
}
FOR_HOST |= {"signal.cuh"}


def test_the_guide_to_csrc_names_the_same_layers():
    rows = re.findall(r"^\| `include/kccl/(\w+)\.cuh` \|.*\| ([\w, ]+) \|$", GUIDE, re.MULTILINE)
    listed = {name: set(above.split(", ")) for name, above in rows}
    wanted = {
        file.removesuffix(".cuh"): {Path(above).stem for above in included - MEM}
        for file, included in INCLUDES.items()
        if file.endswith(".cuh") and not file.startswith(("mem", "platform"))
    }
    assert {name: listed[name] for name in wanted} == wanted


def test_csrc_includes_only_what_lies_below():
    graph = include_graph()
    assert set(INCLUDES) <= {path.name for path in graph}
    for path, included in graph.items():
        if path.name in INCLUDES and path.parent.name != "kernels":
            allowed = INCLUDES[path.name]
        elif path.parent.name == "kernels":
            allowed = FOR_KERNELS | FALLS_BACK_TO.get(path.stem, set())
        elif path.name == "collectives.cuh":
            allowed = {f"{each.stem}.cuh" for each in (ROOT / "csrc/kernels").iterdir()}
            allowed |= {"grid.cuh"}
        elif path.name == "kccl.cuh":
            # What no kernel of the library needs, it adds itself.
            allowed = {f"{each.stem}.cuh" for each in (ROOT / "csrc/kernels").iterdir()}
            allowed |= {"stage.cuh", "collectives.cuh"}
        elif path.parent.name == "sim":
            allowed = {each.name for each in (ROOT / "csrc/sim").iterdir()} | {"abi.h"}
        else:
            assert path.parent.name == "host", f"{path}: give it a line in INCLUDES"
            allowed = FOR_HOST
        assert included <= allowed, f"{path.relative_to(ROOT)} includes {included - allowed}"


# What only the targets' parts of mem.cuh may contain, and who else may for which reason.
ONLY_IN_MEM = {
    r"\basm\b": {},
    r"\b__atomic_\w+": {
        "probe.cpp": {"__atomic_signal_fence"},
        # The simulated memory itself, which the ranks' host threads share.
        "accesses.cpp": {"__atomic_store_n"},
        "memory.h": {"__atomic_load_n"},
    },
    # Below mem.cuh: AMD has no block-wide vote, so the block counts in shared memory of its own.
    r"\b__scoped_atomic_\w+": {
        "platform.cuh": {"__scoped_atomic_fetch_or", "__scoped_atomic_load_n"}
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
        text = without_comments(ROOT / "csrc/include/kccl" / name)
        # keep() of mem_cuda.cuh has it as part of two instructions.
        assert re.findall(r"(?<!asm )(?<!(?:st|ld)\.)\bvolatile\b", text) == []


def test_the_simulators_stacks_are_switched_in_one_file():
    for path in source_files("csrc", "cuh", "h", "hpp", "inc", "cpp"):
        if path.stem == "fiber":
            continue
        found = re.findall(r"\b\w*(?:ucontext|setjmp|longjmp|jmp_buf)\w*", without_comments(path))
        assert not found, f"{path.relative_to(ROOT)}: {found}"


# ---- kccl: which module may import which -------------------------------------------------------

# Modules by layer, lowest first. A module imports from layers below its own.
LAYERS = (
    # setup.py runs `compilers` before there is a package.
    {"errors", "_core", "compilers"},
    {"env", "dtypes", "abi", "sockets", "arguments", "gpu", "backends.watch", "remains"},
    {"arrays", "dlpack", "mesh", "plan", "failure", "topology", "kernels", "jit", "gpu_release"},
    {"bootstrap", "memory", "groups", "sim.library", "sim.regions", "device_arrays", "jit_cuda"},
    {
        "backends.common",
        "calls",
        "collectives.reduction",
        "sim.symbols",
        "cuda_library",
        "gpu_graph",
        "gpu_memory",
    },
    {"backends.host", "one_sided", "module", "sim.report", "backends.cuda_state", "gpu_sharing"},
    {"backends.cuda", "checks_cuda"},
    # From addresses to words, from words to files; then the machine that uses them.
    {"sim.trace_file"},
    {"sim.machine"},
    {"sim.mesh"},
    {"backends.sim"},
    {f"collectives.{name}" for name in ("all_reduce", "all_gather", "barrier", "broadcast")}
    | {"collectives.reduce_scatter"},
    {"comm"},
    {"start", "probe", "simulator"},
    {"interop.torch_tensors"},
    {"interop.torch_work", "interop.torch_ops"},
    {"interop.torch_group"},
    {"interop.torch"},
    # What a person starts. These print, and may use everything.
    {"launch", "bench", "warm"},
    {"checks"},
    {"doctor"},
    {"cli"},
    {"__main__"},
)
# Only for annotations, at most: these name a class of a layer above and never run.
ANNOTATED_UPWARDS = {("calls", "comm"), ("groups", "comm"), ("module", "comm")}
# kccl/__init__.py loads everything at first use, and is what bench and cli see of kccl.
PACKAGE = "__init__"
LEVEL = {module: level for level, modules in enumerate(LAYERS) for module in modules}


def test_kccl_imports_only_downwards():
    for path in python_files("kccl"):
        module = ".".join(path.relative_to(ROOT / "kccl").with_suffix("").parts)
        if module == PACKAGE or module.endswith(".__init__"):
            continue
        assert module in LEVEL, f"{path.name}: give it a place in LAYERS"
        for name, when in python_imports(path):
            if not name.startswith("kccl."):
                continue
            below = name.removeprefix("kccl.")
            below = below if below in LEVEL else below.split(".")[0]
            if below not in LEVEL:
                # A name of kccl itself.
                assert below in {*kccl.__all__, PACKAGE}, f"{module} imports {name}"
                assert LEVEL[module] > LEVEL["comm"], f"{module} imports kccl.{below}"
                continue
            if when == "annotation" and (module, below) in ANNOTATED_UPWARDS:
                continue
            assert LEVEL[below] < LEVEL[module], f"{module} imports {below} ({when})"


def test_topology_imports_nothing_of_kccl():
    for path in python_files("topology"):
        for name, _ in python_imports(path):
            assert name.startswith("kccl.topology.") or name.split(".")[0] != "kccl", path.name


@pytest.mark.parametrize("folder", ["bench", "examples"])
def test_users_of_kccl_see_its_public_names_only(folder):
    public = {*kccl.__all__, "bench", "interop"}
    for path in python_files(folder):
        for name, _ in python_imports(path):
            parts = name.split(".")
            if parts[0] == "kccl" and len(parts) > 1:
                assert parts[1] in public, f"{path.name} imports {name}"
        text = path.read_text()
        used = set(re.findall(r"(?<![.\w/])kccl\.(\w+)", text)) - {"cuh"}
        assert used <= public, f"{path.name} uses kccl.{used - public}"
        private = set(re.findall(r"\bcomm\.(_\w+)", text))
        assert not private, f"{path.name} uses comm.{private}"


# A program that imports one of these has asked for its library.
INTEROP = {f"kccl/interop/torch{part}.py" for part in ("", "_group", "_ops", "_tensors", "_work")}
# Who may import a big library, inside a function only.
LAZY_ONLY = {
    "mpi4py": {"kccl/bootstrap.py", "bench/baselines.py", "bench/mpi_job.py"},
    "torch": {*INTEROP, "bench/gpu_peers.py"},
    "matplotlib": {"bench/plot.py", "topology/heatmap.py"},
    "pandas": {"bench/report.py"},
    "rich": None,  # anywhere
}


@pytest.mark.parametrize("library", LAZY_ONLY)
def test_big_libraries_are_imported_lazily(library):
    allowed = LAZY_ONLY[library]
    for folder in ("kccl", "bench", "topology"):
        for path in python_files(folder):
            where = path.relative_to(ROOT).as_posix()
            for name, when in python_imports(path):
                if name.split(".")[0] != library or when == "annotation":
                    continue
                is_lazy = when == "function" or where in INTEROP
                assert is_lazy, f"{where} imports {name} when it is imported"
                assert allowed is None or where in allowed, f"{where} imports {name}"


# ---- Names -------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["kccl", "kccl.topology"])
def test_all_names_only_what_exists(package):
    module = __import__(package, fromlist=["__all__"])
    missing = [name for name in module.__all__ if not hasattr(module, name)]
    assert missing == []


# One concept, one word: what is refused, and what is said instead.
REFUSED = {
    "nranks": "world_size",
    "num_ranks": "world_size",
    "n_ranks": "world_size",
    "n_devices": "world_size",
    "my_rank": "rank",
    "cur_rank": "rank",
    "my_pe": "rank",
    "npes": "world_size",
    "remote_rank": "peer",
    "dst_rank": "peer",
    "source_rank": "root",
    "sym_mem": "window",
    "ipc_buffer": "window",
    "semaphore": "signal",
    "workspace": "scratch",
    "buf_id": "parity",
    "allpair": "one_shot",
    "fullmesh": "one_shot",
    "1stage": "one_shot",
    "rsag": "two_shot",
    "2stage": "two_shot",
    "nvls": "multimem",
    "low_latency": "ll8, ll16",
    "num_sms": "num_blocks",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
}
# MPI's, NCCL's, PyTorch's and FlashInfer's own names; the out-of-band exchange is named as mpi4py
# names its own.
FOREIGN = {"Allreduce", "allreduce", "allgather", "Iallreduce", "Allgather", "_allgather_base"}
FOREIGN |= {"MPI_Allgather", "allreduce_fusion", "create_allreduce_fusion_workspace"}


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def test_refused_words_are_in_no_identifier():
    refused = re.compile("|".join(map(re.escape, REFUSED)))
    found = []
    for path in source_files(".", "cuh", "cu", "h", "hpp", "inc", "cpp", "py"):
        for name in identifiers(path):
            match = refused.search(_snake_case(name))
            if match and name not in FOREIGN:
                found.append(f"{path.relative_to(ROOT)}: {name}, say {REFUSED[match[0]]}")
    assert found == []
