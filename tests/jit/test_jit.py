"""Compiling at run time: a key covers all that shapes the code; a damaged entry is made again."""

import fcntl
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from long import long_after
from sim_machine import ALL_KINDS

import kccl
from kccl.base import abi
from kccl.jit import cache as jit
from kccl.jit import compilers
from kccl.sim.library import library_kernel, load

SOURCE = """
#include <kccl/kccl.cuh>
#include "answer.cuh"
KCCL_KERNEL void answer(int64_t* out) {
    if (kccl::leads(kccl::block())) *out = kAnswer;
}
"""


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache for one test."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KCCL_CACHE", str(folder))
    return folder


@pytest.fixture
def header(tmp_path):
    """A header that the source includes through another header."""
    (tmp_path / "answer.cuh").write_text('#include "value.cuh"\n')
    path = tmp_path / "value.cuh"
    path.write_text("constexpr int kAnswer = 42;\n")
    return path


@pytest.fixture
def compilations(monkeypatch):
    """A list that grows by one for each compilation."""
    made = []
    real = jit._make_sim

    def counted(*args):
        made.append(args)
        return real(*args)

    monkeypatch.setattr(jit, "_make_sim", counted)
    return made


def compile_answer(header, **options):
    return jit.compile_sim(SOURCE, ["answer"], include_dirs=[header.parent], **options)


def entries(cache):
    return [path for path in cache.rglob("*") if path.is_file()]


def test_what_was_compiled_is_kept(cache, header, compilations):
    path = compile_answer(header)
    assert compile_answer(header) == path
    assert len(compilations) == 1
    assert entries(cache) == [path]


def test_the_key_covers_what_shapes_the_code(cache, header, compilations):
    paths = {compile_answer(header), compile_answer(header, warp_size=64)}
    header.write_text("constexpr int kAnswer = 43;\n")
    paths.add(compile_answer(header))
    paths.add(jit.compile_sim(SOURCE + "\n", ["answer"], include_dirs=[header.parent]))
    paths.add(jit.compile_sim(SOURCE, ["answer", "answer"], include_dirs=[header.parent]))
    assert len(paths) == len(compilations) == 5


def test_the_key_covers_the_compiler(cache, header, compilations, monkeypatch):
    path = compile_answer(header)
    monkeypatch.setattr(jit, "_version", lambda command: "another version")
    assert compile_answer(header) != path


def test_the_key_covers_the_abi(cache, header, compilations, monkeypatch):
    path = compile_answer(header)
    monkeypatch.setattr(jit, "ABI_VERSION", jit.ABI_VERSION + 1)
    assert compile_answer(header) != path


def damaged(content):
    return content[:1000] + bytes([content[1000] ^ 1]) + content[1001:]


@pytest.mark.parametrize(
    "spoil",
    long_after(
        1,
        [
            damaged,
            lambda content: content[:-7],
            lambda content: b"",
            lambda content: content + b"\0",
        ],
    ),
    ids=["a bit", "cut", "empty", "longer"],
)
def test_a_damaged_entry_is_made_anew(cache, header, compilations, spoil):
    path = compile_answer(header)
    whole = path.read_bytes()
    path.write_bytes(spoil(whole))
    assert compile_answer(header) == path
    assert len(compilations) == 2
    assert jit._is_whole(path, path.stem)
    assert load(path, 1).entries[0].parameters == ((8, 8),)


def test_an_entry_under_a_wrong_name_is_made_anew(cache, header, compilations):
    path, other = compile_answer(header), compile_answer(header, warp_size=64)
    path.write_bytes(other.read_bytes())
    compile_answer(header)
    assert len(compilations) == 3
    assert path.read_bytes() != other.read_bytes()


def test_one_of_several_processes_compiles(cache, header, monkeypatch, tmp_path):
    calls, compiler = tmp_path / "calls", tmp_path / "compiler"
    words = shlex.join(compilers.find_cxx())
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nexec {words} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    program = (
        "import sys; from pathlib import Path; from kccl.jit import cache as jit\n"
        "from kccl.sim.library import load\n"
        "source, folder = sys.argv[1:]\n"
        "load(jit.compile_sim(source, ['answer'], include_dirs=[Path(folder)]), 1)\n"
    )
    command = [sys.executable, "-c", program, SOURCE, str(header.parent)]
    jobs = [subprocess.Popen(command) for _ in range(3)]
    assert [job.wait(60) for job in jobs] == [0, 0, 0]
    (entry,) = entries(cache)
    assert compile_answer(header) == entry
    assert len([call for call in calls.read_text().splitlines() if " -c " in call]) == 1


def test_a_process_that_holds_the_lock_and_does_nothing(cache, header, monkeypatch):
    path = compile_answer(header)
    path.unlink()
    monkeypatch.setattr(jit, "_LONGEST_S", 0.2)
    with open(path.with_suffix(".lock"), "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert compile_answer(header) == path and path.exists()


def test_a_failed_write_leaves_nothing(cache, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(kccl.BackendError, match=r"cannot write .*set KCCL_CACHE"):
        jit.write(cache / "entry", b"content")
    assert entries(cache) == []


def test_a_cache_that_is_no_folder(monkeypatch, tmp_path, header):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KCCL_CACHE", str(tmp_path / "file"))
    with pytest.raises(kccl.BackendError, match="set KCCL_CACHE to a folder"):
        compile_answer(header)


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.delenv("KCCL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cache_folder() == tmp_path / "kccl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert jit.cache_folder() == Path.home() / ".cache" / "kccl"


@pytest.mark.long
@pytest.mark.parametrize("kernel", [each for each in abi.KERNELS if each not in ALL_KINDS])
def test_every_kernel_that_no_program_of_the_simulator_has_compiles(kernel):
    """All kernels take one KcclCall; which of them are templates is read from their files."""
    entry = library_kernel(kernel, dtype="bfloat16", op="avg", warp_size=64)
    assert entry.parameters == ((abi.ffi.sizeof("KcclCall"), abi.ffi.alignof("KcclCall")),)
    assert entry.argument_bytes == abi.ffi.sizeof("KcclCall")


# ---- Errors ----------------------------------------------------------------------------------


def test_an_error_has_the_compilers_log():
    source = "#include <kccl/kccl.cuh>\n\nKCCL_KERNEL void wrong() { nonsense; }\n"
    with pytest.raises(kccl.CompileError, match="source does not compile") as raised:
        kccl.compile(source, ["wrong"])
    assert "source:3:" in raised.value.log
    assert "nonsense" in raised.value.log


def test_a_kernel_that_is_not_in_the_source():
    with pytest.raises(kccl.CompileError) as raised:
        kccl.compile("#include <kccl/kccl.cuh>\n", ["absent"])
    assert "absent" in raised.value.log


def test_a_function_that_is_defined_nowhere():
    source = """
#include <kccl/kccl.cuh>
extern "C" void kccl_nobody_has_this();
KCCL_KERNEL void lost() { kccl_nobody_has_this(); }
"""
    with pytest.raises(kccl.CompileError, match="kccl_nobody_has_this"):
        kccl.compile(source, ["lost"])


def test_an_include_that_is_a_macro():
    with pytest.raises(kccl.CompileError, match="cannot follow #include WHAT: name the file"):
        kccl.compile('#define WHAT "a.cuh"\n#include WHAT\n', ["a"])


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(compilers, "find_cxx", lambda: None)
    with pytest.raises(kccl.BackendError, match=r"no C\+\+ compiler.*pip install ziglang"):
        kccl.compile("", ["a"])


def test_a_compiler_that_does_not_run(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    with pytest.raises(kccl.BackendError, match="cannot run no-such-compiler"):
        kccl.compile("", ["a"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warp_size": 16}, "warp_size is 16, must be 32 or 64"),
        ({"target": "metal"}, "target is 'metal', must be one of sim, cuda, hip"),
        ({"kernels": "answer"}, "kernels is 'answer', must be a list of names"),
        ({"kernels": []}, "kernels is \\[\\], must be a list"),
        ({"source": Path("/no/such/file.cuh")}, "source /no/such/file.cuh cannot be read"),
        ({"source": "mine.cu"}, r"is 'mine.cu', which looks like a path \(no such file is there"),
        ({"source": " a/b.hip\n"}, r"for a file pass pathlib.Path\('a/b.hip'\)"),
        ({"source": __file__}, "which looks like a path: a str is the text of a source"),
    ],
    ids=lambda value: "",
)
def test_wrong_arguments(options, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        kccl.compile(**{"source": "", "kernels": ["answer"]} | options)


# ---- Compilers -------------------------------------------------------------------------------


def test_which_compiler(monkeypatch):
    monkeypatch.setattr(compilers.shutil, "which", lambda name: None)
    assert compilers.find_cxx({"CXX": "ccache g++ -m64"}) == ["ccache", "g++", "-m64"]
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    assert compilers.find_cxx({}) is None
    monkeypatch.setattr(compilers, "find_spec", lambda name: name)
    assert compilers.is_zig(compilers.find_cxx({}))
    monkeypatch.setattr(compilers.shutil, "which", lambda name: name if name == "c++" else None)
    assert compilers.find_cxx({}) == ["c++"]


@pytest.mark.parametrize(
    ("cxx", "linker"),
    [
        ("g++", "gcc"),
        ("clang++-19", "clang-19"),
        ("ccache /usr/bin/x86_64-linux-gnu-g++-12 -m64", None),
        ("icpx", "icpx"),
    ],
)
def test_the_c_driver_links(monkeypatch, cxx, linker):
    monkeypatch.setattr(compilers.shutil, "which", lambda name: name)
    wanted = linker or "ccache /usr/bin/x86_64-linux-gnu-gcc-12 -m64"
    assert compilers.linker_of(cxx.split()) == wanted.split()


@pytest.mark.skipif(find_spec("ziglang") is None, reason="no ziglang")
def test_zig_compiles_too(monkeypatch, cache, header):
    """For copies clang calls other functions than g++; csrc/sim/module.inc has those of both."""
    monkeypatch.setenv("CXX", shlex.join(compilers.zig("c++")))
    source = """
#include <kccl/kccl.cuh>
struct Big {
    uint64_t words[100];
};
KCCL_KERNEL void copies(Big* out, const Big* in, uint64_t count) {
    out[0] = in[0];
    __builtin_memset(out + 1, 7, count * sizeof(Big));
    __builtin_memmove(out + 2, out + 1, count * sizeof(Big));
}
"""
    module = kccl.compile(source, ["copies"])

    def main(comm):
        import numpy as np

        out, given = np.zeros((3, 100), np.int64), np.arange(100)
        module.kernel("copies")(comm, out, given, np.uint64(1), block=32)
        return out

    # All 32 threads write the same words: a race, if the simulator sees these copies.
    with pytest.raises(kccl.ProtocolError, match="source:"):
        kccl.run_threads(main, 1, backend="sim")
