"""libkccl_nccl.so before a stub of NCCL: who makes a call, and whether its result is right.

The program is C++ without Python (linking/ranks_of_nccl.cpp). The stub is linking/stub_nccl.cpp.
The driver is a fake (linking/fake_*.cpp), which runs the library's kernels on the CPU. So the
launches and the shared memory are real, and streams do at once what they are given.
"""

import ctypes
import re
import subprocess

import pytest
from device_compilers import find_nvrtc
from long import hunted
from nccl_program import compile_cpp, compile_program, makers, right, told
from source_tree import ROOT, replace_once

from kccl.backends.shapes import launch_shape
from kccl.base import dtypes
from kccl.interop import nccl, nccl_headers, nccl_tables
from kccl.plan.specs import BY_NAME

needs_nvrtc = pytest.mark.skipif(
    find_nvrtc() is None, reason="the nvidia-cuda-nvrtc wheel is not installed"
)
pytestmark = [pytest.mark.long, pytest.mark.takes(42)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the library, the stub, the fake driver and the program."""
    made = tmp_path_factory.mktemp("nccl")
    nccl.build(made, archs=["compute_90"], world_sizes=[2], flags=["-Werror"])
    shared = ("-shared", "-fPIC")
    fakes = ("fake_cuda.cpp", "fake_launches.cpp", "fake_captures.cpp")
    driver = ("-DKCCL_HOST_GRID=1", "-DKCCL_HOLDS_FAILED=1", "-Wl,-soname,libcuda.so.1")
    compile_cpp(made, fakes, "libcuda.so.1", *shared, *driver)
    compile_cpp(made, ("stub_nccl.cpp",), "libnccl.so.2", *shared, "-Wl,-soname,libnccl.so.2")
    compile_program(made, made / "libnccl.so.2", made / "libcuda.so.1")
    return made


def by_stub(log):
    """How many calls of rank 0 the stub made."""
    return sum(bool(re.match(r"NCCL: rank 0: nccl", line)) for line in log)


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
    assert makers(log) == {
        "all_reduce_one_shot_ll16": 3 * 5,  # up to 2,049 floats
        "all_reduce_one_shot_sentinel": 3,
        "all_reduce_two_shot_sentinel": 3,
        "NCCL": 3,
    }
    # The start-up exchanges by NCCL, too.
    assert by_stub(log) == 3 + sum("NCCL: rank 0: ncclAllGather" in line for line in log)
    ends = [line.partition(": ")[2] for line in log if line.startswith("kccl: process ")]
    assert [re.sub(r"\d+", "N", end, count=1) for end in ends] == [
        f"process N: {3 * 7} calls by KCCL, 3 by NCCL"
    ] * 2


@needs_nvrtc
def test_a_group_of_several_collectives_is_nccls(folder):
    _, log = told(folder, "group")
    # The first of two is held, and then goes to NCCL: it has two lines.
    assert makers(log) == {"all_reduce_one_shot_ll16": 3 * 4, "NCCL": 3 * 2}


@needs_nvrtc
@pytest.mark.parametrize(
    ("ranks", "variables", "reason"),
    [
        (3, {}, "this build has no kernels for so many ranks"),
        (2, {"FAKE_CUDA_SHARES_GPU": "1"}, "ranks share a GPU"),
        (2, {"FAKE_CUDA_HAS_NO_NVLINK": "1"}, "nothing was measured without NVLink"),
        (2, {"NCCL_P2P_DISABLE": "1"}, "NCCL_P2P_DISABLE=1"),
        (2, {"FAKE_CUDA_FAILS": "cuMemCreate:1"}, "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"),
    ],
)
def test_what_kccl_cannot_serve_passes_through(folder, ranks, variables, reason):
    said, log = told(folder, "sum", ranks, **variables)
    assert said == right(ranks)
    assert set(makers(log)) <= {"NCCL"} and by_stub(log) >= 3 * 8
    told_of = [line for line in log if re.match(r"kccl: rank \d of \d: communicator", line)]
    assert len(told_of) == ranks and all(reason in line for line in told_of)


@needs_nvrtc
def test_kccl_can_be_switched_off(folder):
    said, log = told(folder, "sum", KCCL_NCCL="off")
    assert said == right() and by_stub(log) > 3 * 8
    assert not any(line.startswith("kccl") for line in log)


@needs_nvrtc
def test_a_late_rank_is_an_error_of_the_communicator(folder):
    said, _ = told(folder, "late", KCCL_TIMEOUT="3")
    assert [line for line in said if line.endswith(": right")] == right()
    (sentence,) = [line for line in said if not line.endswith(": right")]
    assert re.match(
        r"rank 0: all_reduce_one_shot_ll16 on channel 0: peer 1 did not arrive; rank 0 waited for "
        r"peer 1: epoch seen 0, wanted 2, after 3",
        sentence,
    )


@needs_nvrtc
def test_a_graph_that_fails_does_not_end_with_wrong_data(folder):
    assert told(folder, "held", KCCL_TIMEOUT="3")[0] == right()


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


# What orders calls, rule by rule: (file, code, code without the rule), and the part that needs it.
BUGS = {
    "a call waits for that of another stream": (
        "served.cpp",
        "has_called_ && stream_id != last_stream_id_",
        "has_called_ && stream_id == 0",
        "streams",
    ),
    "a graph waits for the graphs before": (
        "captures.cpp",
        "return found == calls_.end() ? wait_for_graphs(stream, capture)\n",
        "return found == calls_.end() ? CUDA_SUCCESS\n",
        "graphs",
    ),
    "the record comes after the last call": (
        "captures.cpp",
        "const CUresult code = add(graph, &last, &calls.record, &kFromTheEnd, 1);",
        "const CUresult code = add == nullptr ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;\n"
        "    return code;",
        "graphs",
    ),
    "calls of two streams in a capture": (
        *("captures.cpp", "if (!come_after(calls, ended)) {", "if (false) {"),
        "graph",
    ),
    "a group waits on all its streams": (
        "calls.cpp",
        "result = calls.served->join(calls.first(), stream);",
        "(void)stream;",
        "messages",
    ),
}


def planted_in(folder, tmp_path, file, code, without):
    """The library without a rule."""
    source = ROOT / "csrc" / "nccl" / file
    planted = tmp_path / file
    planted.write_text(replace_once(source.read_text(), code, without, source))
    nccl.compile_source(folder, planted, planted.with_suffix(".o"), ["-Werror"])
    others = [each for each in folder.glob("*.o") if each.name != f"{planted.stem}.o"]
    nccl.link([*others, planted.with_suffix(".o")], tmp_path / nccl.LIBRARY)
    return str(tmp_path / nccl.LIBRARY)


@needs_nvrtc
@pytest.mark.parametrize("rule", hunted(BUGS))
def test_a_missing_rule_is_found(folder, tmp_path, rule):
    *bug, part = BUGS[rule]
    said, _ = told(folder, part, code=1, LD_PRELOAD=planted_in(folder, tmp_path, *bug))
    assert any(": wrong: " in line for line in said)


def unbounded(log):
    """The launches beside which a second one has no room, on ranks whose GPUs differ."""
    pattern = r"launch: gpu (\d+): blocks (\d+), threads (\d+), fit (\d+), room (\d+)"
    found = [re.fullmatch(pattern, line) for line in log]
    launches = [tuple(map(int, each.groups())) for each in found if each]
    shapes = {gpu: [each[1:3] for each in launches if each[0] == gpu] for gpu in (132, 78)}
    assert len(shapes[78]) == 4
    if shapes[132] != shapes[78]:
        return ["shapes that differ"]
    # A dependent that comes early takes the room of a second launch.
    return [
        (gpu, blocks, threads, fit)
        for gpu, blocks, threads, fit, room in launches
        if blocks > gpu or room < 2 or (fit > 0 and room < 4 and 2 * blocks > 78)
    ]


@needs_nvrtc
def test_two_launches_have_room_on_gpus_that_differ(folder):
    said, log = told(folder, "bounds", FAKE_CUDA_DIFFERS="1")
    assert said == right() and unbounded(log) == []
    assert any("blocks 78, threads 320, fit 0, room 2" in line for line in log)


# The bounds of launches, as BUGS.
UNBOUNDED = {
    "a large call admits no dependent early": (
        "served.cpp",
        "room->second >= 2 * kAtOnce || 2 * shape.blocks <= multiprocessors_",
        "room->second > 0",
    ),
    "two blocks have room": ("images.cpp", "blocks >= kAtOnce", "blocks >= 1"),
}


@needs_nvrtc
@pytest.mark.parametrize("rule", hunted(UNBOUNDED))
def test_a_missing_bound_is_found(folder, tmp_path, rule):
    library = planted_in(folder, tmp_path, *UNBOUNDED[rule])
    _, log = told(folder, "bounds", LD_PRELOAD=library, FAKE_CUDA_DIFFERS="1")
    assert unbounded(log)


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
    sources = (folder / "shapes.cpp", ROOT / "csrc" / "nccl" / "plan.cpp")
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
                most = 320 if count % 2 else 512
                asked.append(f"{number} {type_number} {count} {most}")
                wanted.append(answer(lines, collective, dtype, count, most))
    done = subprocess.run(
        [folder / "shapes"], input="\n".join(asked), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == wanted
    assert len(set(wanted)) > 30


def answer(lines, collective, dtype, count, most):
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
    shape = launch_shape(spec, length, of.name, most, line.blocks, line.threads, warp_size=32)
    return f"{spec.name} {shape[0]} {shape[1]} {spec.share(length, of.name, shape[0])}"
