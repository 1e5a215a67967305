"""aarch64: the C++ programs of the tests under QEMU, and the instructions that order memory.

QEMU on x86 shows no weak memory. The simulator does; here the assembly shows that each order of
mem.cuh has its instruction. `make wheel` compiles the whole core.
"""

import re
import subprocess
from pathlib import Path

import aarch64
import pytest
import test_engine_core
from compilers import cxx
from source_tree import ROOT, replace_once
from test_sanitizers import build_program

import kccl

# A store and a load that order, also of one of the extensions; as patterns.
RELEASES, ACQUIRES, FENCE, ACQUIRE_FENCE = "stlr", "ldap?r", r"dmb\tish", r"dmb\tishld"
# (what mem.cuh is asked for, the instructions of it in their order).
ACCESSES = {
    "store<Order::kRelaxed, Scope::kSystem>(word, value);": ["str"],
    "store<Order::kRelease, Scope::kSystem>(word, value);": [RELEASES],
    "store<Order::kRelease, Scope::kSystem>(wide, uint64_t{value});": [RELEASES],
    "store_shared(word, value);": [RELEASES],
    "use(load<Order::kRelaxed, Scope::kSystem>(word));": ["ldr"],
    "use(load<Order::kAcquire, Scope::kSystem>(word));": [ACQUIRES],
    "use(load<Order::kAcquire, Scope::kSystem>(wide));": [ACQUIRES],
    "use(load_shared(word));": [ACQUIRES],
    "fence<Order::kAcquire, Scope::kSystem>();": [ACQUIRE_FENCE],
    "fence<Order::kRelease, Scope::kSystem>();": [FENCE],
    "fence<Order::kAcqRel, Scope::kSystem>();": [FENCE],
    "fence<Order::kSeqCst, Scope::kSystem>();": [FENCE],
    "add<Order::kRelease, Scope::kSystem>(word, value);": ["ldxr", "stlxr"],
    "use(add_shared(word, value));": ["ldaxr", "stlxr"],
    # The second half orders what the peer did before, or does after it.
    "store_packet<Scope::kSystem>(packet, {{1, 2}});": ["str", RELEASES],
    "const Packet p = load_packet<Scope::kSystem>(packet); use(p.half[0] + p.half[1]);": [
        "ldr",
        ACQUIRES,
    ],
    # What comes before and after a release or an acquire stays there.
    "*plain = value; store<Order::kRelease, Scope::kSystem>(word, value);": ["str", RELEASES],
    "use(load<Order::kAcquire, Scope::kSystem>(word) + *plain);": [ACQUIRES, "ldr"],
    "*plain = value; fence<Order::kRelease, Scope::kSystem>(); "
    "store<Order::kRelaxed, Scope::kSystem>(word, value);": ["str", FENCE, "str"],
    "poll_pause();": ["isb"],
}
# They compile the engine's programs. Zig takes twice as long for -O2.
FLAGS = ["-O1", "-DONLY_BASELINE"]
# No -O: for each other one, Zig compiles another C++ library, which takes more than a minute.
TO_LINK: list[str] = []


def assembly_of(bodies: list[str], folder: Path) -> list[str]:
    """The assembly of functions with these bodies, compiled as the core is."""
    text = "#include <kccl/mem.cuh>\nusing namespace kccl;\nusing namespace kccl::mem;\n"
    for number, body in enumerate(bodies):
        text += (
            f'extern "C" uint64_t f{number}(uint32_t* word, uint64_t* wide, uint32_t* plain, '
            "Packet* packet, uint32_t value) {\n    uint64_t used = value;\n"
            "    [[maybe_unused]] const auto use = [&](uint64_t given) { used = given; };\n"
            f"    {body}\n    return used;\n}}\n"
        )
    source, target = folder / "accesses.cpp", folder / "accesses.s"
    source.write_text(text)
    command = [*aarch64.CXX, "-std=c++20", "-O2", f"-I{kccl.include_dir()}", "-S", source]
    done = subprocess.run([*command, "-o", target], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^f\d+:(.*?)^\.Lfunc_end", target.read_text(), re.M | re.S)
    assert len(found) == len(bodies)
    return found


@pytest.fixture(scope="module")
def assembly(tmp_path_factory):
    bodies = list(ACCESSES)
    return dict(zip(bodies, assembly_of(bodies, tmp_path_factory.mktemp("mem")), strict=True))


@pytest.mark.parametrize("body", ACCESSES)
def test_each_order_has_its_instruction(body, assembly):
    wanted = ACCESSES[body]
    memory = re.compile(r"^\t(ld\w+|st\w+|dmb\t\w+|isb)", re.M)
    found = memory.findall(assembly[body])
    assert len(found) == len(wanted), assembly[body]
    for instruction, pattern in zip(found, wanted, strict=True):
        assert re.fullmatch(pattern, instruction), assembly[body]


@pytest.fixture(scope="session")
def can_link(tmp_path_factory):
    """Not of the module: a worker would run all tests that have it."""
    aarch64.make_linkable(tmp_path_factory.mktemp("linked"))


needs_links = pytest.mark.usefixtures("can_link")


@needs_links
@pytest.mark.long
@pytest.mark.takes(40, fixtures_apart=True)
def test_the_engine_gives_the_bits_of_this_machine(tmp_path):
    """With NEON on one; test_engine_core.py compares the other's instruction sets."""
    sources = test_engine_core.sources_of_compute(["compute_baseline"])
    printed = []
    for name, command, compiled in (
        ("here", (cxx(),), test_engine_core.known_or_compiled),
        ("there", aarch64.CXX, test_engine_core.compile_all),
    ):
        objects = compiled(command, tmp_path / name, sources, FLAGS)
        program = test_engine_core.link(command, objects, TO_LINK, tmp_path / name / "program")
        run = aarch64.run if name == "there" else test_engine_core.run
        done = run(program, "few sizes")
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(done.stdout.split())
    here, there = printed
    assert there == ["baseline", here[-1]]


@needs_links
@pytest.mark.long
@pytest.mark.takes(40, fixtures_apart=True)
def test_every_kernel_of_the_host(tmp_path):
    most_ranks = "2"
    # Why -O0: Zig takes five times as long for -O1. At -O0 it adds UBSan, which is
    # test_sanitizers.py's.
    flags = ["-O0", "-fno-sanitize=undefined"]
    program = build_program(aarch64.CXX, tmp_path, flags, ("float32",))
    done = aarch64.run(program, most_ranks)
    assert (done.stdout, done.stderr) == ("all results are right\n", "")


@needs_links
@pytest.mark.long
@pytest.mark.takes(40, fixtures_apart=True)
def test_ranks_on_cpus(tmp_path):
    program = tmp_path / "example"
    command = [*aarch64.CXX, "-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
    compiled = tmp_path / "example.o"
    text = (ROOT / "examples/cpp/all_reduce_cpu.cpp").read_text()
    # Under QEMU, threads that poll wait long for each other, the longer the more there are.
    for right, fewer in (("kRanks = 4;", "kRanks = 2;"), ("kSteps = 100;", "kSteps = 10;")):
        text = replace_once(text, right, fewer, "all_reduce_cpu.cpp")
    source = tmp_path / "example.cpp"
    source.write_text(text)
    command += [f"-I{kccl.include_dir()}", "-c", source, "-o", compiled]
    subprocess.run(command, check=True)
    subprocess.run([*aarch64.CXX, *TO_LINK, "-pthread", compiled, "-o", program], check=True)
    assert aarch64.run(program).stdout == "2 ranks: 10 sums of 1000 floats are right\n"
