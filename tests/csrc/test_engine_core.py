"""The engine's C++ by itself: the same bits on every instruction set; threads under sanitizers."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from built_objects import object_of
from compilers import cxx
from long import hunted
from source_tree import ROOT, replace_once

HERE = Path(__file__).parent
HOST = ROOT / "engine" / "host"
COMMON = ["-std=c++20", "-g", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Wno-psabi"]
COMMON += ["-Wno-missing-field-initializers"]
AVX2 = ["-mavx2", "-mbmi2", "-mf16c", "-mfma"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"]
FLAGS = {
    "compute_x86_64_v3": AVX2,
    "compute_x86_64_v4": AVX512,
    "compute_x86_64_vnni": [*AVX512, "-mavx512vnni"],
}
COMPUTE = ("compute_baseline", *FLAGS)
# The files of the threads' program, besides these.
CORE = ("engine", "tasks", "generate", "drafts", "ngrams", "pass", "experts", "logits", "sampler")
CORE += ("answer", "batch", "compute", "compute_baseline")
SANITIZERS = {
    "thread": ["-O1", "-fsanitize=thread"],
    "address": ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"],
}
# At most so often a program with a planted race runs, until ThreadSanitizer reports the race. On a
# busy machine one of the races goes unreported in 1 run of 20.
RUNS = 10
# (text of pass.cpp, what stands there instead): races that ThreadSanitizer must find.
PLANTED = {
    "attention does not wait for the heads": (
        "    prepare_heads(op);\n    return block_.await_rank(publish());",
        "    prepare_heads(op);\n    publish();\n    return true;",
    ),
    "a product does not wait for the norms of other blocks": (
        "    return is_alone() || block_.await_rank(publish());\n}\n\nColumns",
        "    if (!is_alone()) publish();\n    return true;\n}\n\nColumns",
    ),
    "the logits do not wait for the residuals of other blocks": (
        "    // With several columns, other blocks read residuals that this block has written.\n"
        "    return is_alone() || block_.await_rank(publish());",
        "    if (!is_alone()) publish();\n    return true;",
    ),
    "a message is read before it came": (
        "if (op.rule.receives >= 0 && !block_.await_all(steps_of_modules_[op.rule.receives]))",
        "if (op.rule.receives >= 0 && step == 0)",
    ),
    "the pass behind begins too early": (
        "bool Pass::meet() { return block_.await_all(publish()); }",
        "bool Pass::meet() { return block_.await_rank(publish()); }",
    ),
}

pytestmark = pytest.mark.takes(36)


@pytest.fixture(scope="module")
def compiler():
    return (cxx(),)


def compile_all(compiler, folder, sources, flags):
    """Compiles the sources side by side; returns the objects by the sources' names.

    The compiler is a command of one or more words.
    """
    folder.mkdir(exist_ok=True)

    def compile_one(source):
        target = folder / f"{source.stem}.o"
        includes = [f"-I{ROOT / 'kccl'}", f"-I{ROOT}", f"-I{HOST}"]
        own = FLAGS.get(source.stem, [])
        command = [*compiler, *COMMON, *flags, *own, *includes, "-c", source, "-o", target]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return target

    with ThreadPoolExecutor(2) as pool:
        return {each.stem: each for each in pool.map(compile_one, sources)}


def link(compiler, objects, flags, program):
    command = [*compiler, *flags, "-pthread", *objects.values(), "-o", program]
    subprocess.run(command, check=True)
    return program


def build(compiler, folder, sources, flags):
    return link(compiler, compile_all(compiler, folder, sources, flags), flags, folder / "program")


def run(program, *words):
    options = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        [program, *words], capture_output=True, text=True, env=os.environ | options
    )


def sources_of_threads():
    """What the threads' program is made of."""
    engine = [HOST / f"{name}.cpp" for name in CORE]
    return [HERE / "sanitize/engine_threads.cpp", *engine, ROOT / "csrc/host/idle.cpp"]


def sources_of_compute(compute=COMPUTE):
    """What the program is made of that compares instruction sets. compute: their files."""
    return [HERE / "engine_compute.cpp", *(HOST / f"{name}.cpp" for name in ("compute", *compute))]


def known_or_compiled(compiler, folder, sources, flags):
    """The core's own objects where they are built, and the others compiled."""
    known = {source.stem: object_of(source) for source in sources}
    known = {name: built for name, built in known.items() if built is not None}
    others = [source for source in sources if source.stem not in known]
    return known | compile_all(compiler, folder, others, flags)


@pytest.mark.long
def test_every_instruction_set_gives_the_same_bits(compiler, tmp_path):
    """Those of the core itself, where they are built."""
    folder = tmp_path / "compute"
    objects = known_or_compiled(compiler, folder, sources_of_compute(), ["-O2"])
    done = run(link(compiler, objects, ["-O2"], tmp_path / "compute" / "program"))
    assert done.returncode == 0, done.stdout
    assert done.stdout.split()[0] == "baseline"


@pytest.fixture(scope="module")
def can_sanitize(compiler, tmp_path_factory):
    """Some kernels' randomised addresses defeat ThreadSanitizer."""
    source = tmp_path_factory.mktemp("works") / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    try:
        works = run(build(compiler, source.parent, [source], SANITIZERS["thread"])).returncode == 0
    except subprocess.CalledProcessError:
        works = False
    if not works:
        pytest.skip(f"{compiler[0]} has no working ThreadSanitizer")


@pytest.fixture(scope="module")
def objects(can_sanitize, compiler, tmp_path_factory):
    """The objects of all sources, for ThreadSanitizer."""
    folder = tmp_path_factory.mktemp("thread")
    return compile_all(compiler, folder, sources_of_threads(), SANITIZERS["thread"])


def assert_silent(done):
    assert done.stderr == ""
    assert (done.returncode, done.stdout) == (0, "all results are the same\n")


@pytest.mark.long
def test_blocks_and_ranks_have_no_race(objects, compiler, tmp_path):
    assert_silent(run(link(compiler, objects, SANITIZERS["thread"], tmp_path / "program")))


@pytest.mark.long
def test_memory_is_used_as_it_may_be(can_sanitize, compiler, tmp_path):
    sources = sources_of_threads()
    assert_silent(run(build(compiler, tmp_path / "address", sources, SANITIZERS["address"])))


@pytest.mark.parametrize("what", hunted(PLANTED))
def test_planted_races_are_found(what, objects, compiler, tmp_path):
    right, wrong = PLANTED[what]
    flags = SANITIZERS["thread"]
    spoilt = tmp_path / "pass.cpp"
    spoilt.write_text(replace_once((HOST / "pass.cpp").read_text(), right, wrong, "pass.cpp"))
    own = compile_all(compiler, tmp_path, [spoilt], [*flags, "-Wno-unused-variable"])
    program = link(compiler, objects | own, flags, tmp_path / "program")
    assert any("ThreadSanitizer: data race" in run(program).stderr for _ in range(RUNS))
