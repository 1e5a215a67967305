"""libkccl_nccl.so before a stub of NCCL: who makes a call, and whether its result is right.

The program is C++ without Python (linking/ranks_of_nccl.cpp). The stub is linking/stub_nccl.cpp.
The driver is a fake (linking/fake_*.cpp), which runs the library's kernels on the CPU. So the
launches and the shared memory are real, and streams do at once what they are given.
"""

import ctypes
import os
import re
import subprocess
from collections import Counter

import pytest
from compilers import cxx
from device_compilers import find_nvrtc
from source_tree import ROOT

import kccl
from kccl.backends.shapes import launch_shape
from kccl.base import dtypes
from kccl.interop import nccl, nccl_headers, nccl_tables
from kccl.plan.specs import BY_NAME

LINKING = ROOT / "tests" / "linking"
FLAGS = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror")
needs_nvrtc = pytest.mark.skipif(
    find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed"
)
pytestmark = [pytest.mark.long, pytest.mark.takes(36)]


def includes():
    """Compiler flags for programs of NCCL and of the driver."""
    system = (nccl_headers.folder_of("nccl.h"), nccl_headers.folder_of("cuda.h"))
    own = (kccl.include_dir(), ROOT / "csrc" / "host", nccl.HEADERS)
    return [*(f"-I{each}" for each in own), *(f"-isystem{each}" for each in system)]


def compile_cpp(folder, sources, output, *flags):
    command = [cxx(), *FLAGS, *includes(), *(LINKING / each for each in sources), *flags]
    subprocess.run([*command, "-o", folder / output], check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the library, the stub, the fake driver and the program."""
    made = tmp_path_factory.mktemp("nccl")
    nccl.build(made, archs=["compute_90"], world_sizes=[2])
    shared = ("-shared", "-fPIC")
    fakes = ("fake_cuda.cpp", "fake_launches.cpp", "fake_captures.cpp")
    driver = ("-DKCCL_HOST_GRID=1", "-DKCCL_HOLDS_FAILED=1", "-Wl,-soname,libcuda.so.1")
    compile_cpp(made, fakes, "libcuda.so.1", *shared, *driver)
    compile_cpp(made, ["stub_nccl.cpp"], "libnccl.so.2", *shared, "-Wl,-soname,libnccl.so.2")
    libraries = (made / "libnccl.so.2", made / "libcuda.so.1", f"-Wl,-rpath,{made}")
    programs = ("ranks_of_nccl.cpp", "ranks_of_nccl_graphs.cpp")
    compile_cpp(made, programs, "ranks", *libraries)
    return made


def told(folder, part, ranks=2, *, preloads=True, code=0, **variables):
    """What the ranks say of themselves, and the lines of KCCL's and the stub's logs."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder), "KCCL_NCCL": "log"} | variables
    if preloads:
        environment["LD_PRELOAD"] = str(folder / nccl.LIBRARY)
    done = subprocess.run(
        [folder / "ranks", part, str(ranks)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "leaked" not in done.stderr or code != 0
    return sorted(done.stdout.splitlines()), done.stderr.splitlines()


def right(ranks=2):
    return [f"rank {rank}: right" for rank in range(ranks)]


def made_by(log):
    """How many calls of rank 0 each maker made, by KCCL's log, and how many the stub made."""
    calls = (re.match(r"kccl: rank 0 of \d: nccl\w+, \d+ of \w+: (\w+)", line) for line in log)
    makers = Counter(call[1] for call in calls if call)
    by_stub = sum(bool(re.match(r"NCCL: rank 0: nccl", line)) for line in log)
    return makers, by_stub


@needs_nvrtc
@pytest.mark.parametrize(
    "part",
    [
        *("sum", "halves", "move", "group", "messages", "graph", "graphs"),
        *("streams", "several", "wrong", "abort"),
    ],
)
def test_a_program_gets_right_results(folder, part):
    said, log = told(folder, part)
    assert said == right()
    assert any("KCCL makes short calls" in line for line in log)


@needs_nvrtc
def test_the_program_is_right_without_kccl(folder):
    said, log = told(folder, "sum", preloads=False)
    assert said == right() and not any("kccl" in line for line in log)


@needs_nvrtc
def test_calls_go_where_the_tables_say(folder):
    _, log = told(folder, "sum")
    makers, by_stub = made_by(log)
    assert makers == {
        "all_reduce_one_shot_ll16": 3 * 5,  # up to 2,049 floats
        "all_reduce_one_shot_sentinel": 3,
        "all_reduce_two_shot_sentinel": 3,
        "NCCL": 3,
    }
    # The start-up exchanges by NCCL, too.
    assert by_stub == 3 + sum("NCCL: rank 0: ncclAllGather" in line for line in log)


@needs_nvrtc
def test_a_group_of_several_collectives_is_nccls(folder):
    makers, _ = made_by(told(folder, "group")[1])
    # The first of two is held, and then goes to NCCL: it has two lines.
    assert makers == {"all_reduce_one_shot_ll16": 3 * 4, "NCCL": 3 * 2}


@needs_nvrtc
@pytest.mark.parametrize(
    ("ranks", "variables", "reason"),
    [
        (3, {}, "nothing was measured with so many ranks"),
        (2, {"FAKE_CUDA_SHARES_GPU": "1"}, "ranks share a GPU"),
        (2, {"FAKE_CUDA_HAS_NO_NVLINK": "1"}, "nothing was measured without NVLink"),
        (2, {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1"),
        (2, {"FAKE_CUDA_FAILS": "cuMemCreate:1"}, "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_what_kccl_cannot_serve_passes_through(folder, ranks, variables, reason):
    said, log = told(folder, "sum", ranks, **variables)
    assert said == right(ranks)
    makers, by_stub = made_by(log)
    assert set(makers) <= {"NCCL"} and by_stub >= 3 * 8
    told_of = [line for line in log if re.match(r"kccl: rank \d of \d: communicator", line)]
    assert len(told_of) == ranks and all(reason in line for line in told_of)


@needs_nvrtc
def test_kccl_can_be_switched_off(folder):
    said, log = told(folder, "sum", KCCL_NCCL="off")
    assert said == right() and made_by(log)[1] > 3 * 8
    assert not any(line.startswith("kccl") for line in log)


@needs_nvrtc
def test_a_late_rank_is_an_error_of_the_communicator(folder):
    said, _ = told(folder, "late", KCCL_TIMEOUT="0.5")
    assert [line for line in said if line.endswith(": right")] == right()
    (sentence,) = [line for line in said if not line.endswith(": right")]
    assert re.match(
        r"rank 0: all_reduce_one_shot_ll16 on channel 0: peer 1 did not arrive; rank 0 waited for "
        r"peer 1: epoch seen 0, wanted 2, after 0\.5",
        sentence,
    )


@needs_nvrtc
def test_a_graph_that_fails_does_not_end_with_wrong_data(folder):
    assert told(folder, "held", KCCL_TIMEOUT="0.5")[0] == right()


@needs_nvrtc
def test_a_launch_that_fails_says_why(folder):
    said, log = told(folder, "refused")
    assert said == right()
    (line,) = [line for line in log if line.startswith("kccl: rank 0: ")]
    assert line == (
        "kccl: rank 0: ncclAllReduce failed: all_reduce_one_shot_ll16 was not launched: "
        "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901)"
    )


@needs_nvrtc
def test_an_unknown_mode_is_refused_before_anything_is_sent(folder):
    _, log = told(folder, "sum", KCCL_NCCL="of", code=1)
    assert "kccl: KCCL_NCCL='of' must be one of off, log" in log
    assert not any(line.startswith("NCCL:") for line in log)


@needs_nvrtc
def test_every_function_of_the_header_is_exported(folder):
    library = ctypes.CDLL(str(folder / nccl.LIBRARY))
    header = (nccl_headers.folder_of("nccl.h") / "nccl.h").read_text()
    names = set(re.findall(r"^[\w ]+[ *](p?nccl[A-Z]\w+)\(", header, re.M))
    # Macros on other systems.
    names -= {"ncclResetDebugInit", "pncclResetDebugInit"}
    assert len(names) > 60
    assert [name for name in sorted(names) if not hasattr(library, name)] == []


SHAPES = """
#include <cstdio>

#include "plan.h"

int main() {
    unsigned long long count;
    int collective, type, most;
    while (std::scanf("%d %d %llu %d", &collective, &type, &count, &most) == 4) {
        const auto choice = kccl::nccl::choose(
            {static_cast<kccl::nccl::Collective>(collective), count,
             static_cast<ncclDataType_t>(type), ncclSum, 2});
        if (choice.kernel == nullptr) {
            std::printf("NCCL\\n");
            continue;
        }
        const auto shape = kccl::nccl::shape_of(choice, most, 128);
        std::printf("%s %u %u %u\\n", choice.kernel->name, shape.blocks, shape.threads,
                    shape.share);
    }
}
"""


@needs_nvrtc
def test_choice_and_shape_are_pythons(folder):
    (folder / "shapes.cpp").write_text(SHAPES)
    sources = [folder / "shapes.cpp", ROOT / "csrc" / "nccl" / "plan.cpp"]
    own = (f"-I{folder}", f"-I{ROOT / 'csrc' / 'nccl'}")
    compile_cpp(folder, sources, "shapes", *own)
    types = {7: dtypes.float32, 6: dtypes.float16, 9: dtypes.bfloat16, 1: dtypes.uint8}
    names = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    counts = (1, 2, 33, 1000, 1024, 8192, 8193, 60000, 300001, 1 << 20, 1 << 30)
    asked, wanted = [], []
    lines = nccl_tables.lines([2])
    for number, collective in enumerate(names):
        for type_number, dtype in types.items():
            for count in counts:
                asked.append(f"{number} {type_number} {count} 512")
                wanted.append(answer(lines, collective, dtype, count))
    done = subprocess.run(
        [folder / "shapes"], input="\n".join(asked), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == wanted
    assert len(set(wanted)) > 30


def answer(lines, collective, dtype, count):
    """What choose() and shape_of() must say, by the planner's functions."""
    moves = collective in ("all_gather", "broadcast")
    of = dtypes.uint8 if moves else dtype
    chunk = count * dtype.itemsize
    nbytes = chunk * (2 if collective in ("all_gather", "reduce_scatter") else 1)
    fitting = [
        line
        for line in lines
        if (line.collective, line.dtype) == (collective, of) and nbytes <= line.up_to_bytes
    ]
    if not fitting:
        return "NCCL"
    line, length = fitting[0], chunk if moves else count
    spec = BY_NAME[line.kernel.name]
    shape = launch_shape(spec, length, of.name, 512, line.blocks, line.threads, warp_size=32)
    return f"{spec.name} {shape[0]} {shape[1]} {spec.share(length, of.name, shape[0])}"
