"""csrc/include/kccl/cpu.hpp: ranks on CPUs in C++ programs without Python and without CUDA."""

import subprocess

import aarch64
import pytest
from compilers import cxx
from elftools.elf.elffile import ELFFile
from source_tree import ROOT
from test_linking import configure, run, tool

import kccl

FLAGS = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread")
EXAMPLE = ROOT / "examples" / "cpp" / "all_reduce_cpu.cpp"
OTHER = """
#include <kccl/cpu.hpp>
const KcclDeviceComm& own(const kccl::cpu::Communicator& comm, int rank) {
    return comm.device_comm(rank);
}
"""
PROGRAM = """
#include <kccl/cpu.hpp>

#include <dlfcn.h>
#include <pthread.h>

#include <cstdio>
#include <string>

const KcclDeviceComm& own(const kccl::cpu::Communicator& comm, int rank);

// A machine that refuses the third thread of a program.
bool has_no_third = false;
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*main)(void*), void* argument) noexcept {
    static int count = 0;
    if (has_no_third && ++count == 3) return EAGAIN;
    static const auto real = reinterpret_cast<decltype(&pthread_create)>(
        dlsym(RTLD_NEXT, "pthread_create"));
    return real(thread, attributes, main, argument);
}

int main(int, char** arguments) {
    const std::string part = arguments[1];
    has_no_third = part == "threads";
    try {
        const kccl::cpu::Options options = {
            .channels = part == "options" ? 0 : 1, .max_bytes = 64, .timeout_s = 0.2};
        const kccl::cpu::Communicator comm(part == "world" ? 9 : 3, options);
        comm.run([&](int rank) {
            float x[32] = {1};
            if (rank == 1 && part == "throw") throw kccl::cpu::Error("on purpose");
            if (rank == 1 && part == "late") return;
            const uint64_t count = part == "long" ? 32 : 16;
            kccl::all_reduce(kccl::block(), own(comm, rank), x, x, count);
            comm.check(rank);
            if (x[0] != 3) throw kccl::cpu::Error("a wrong sum");
        });
        std::puts("right");
    } catch (const kccl::cpu::Error& error) {
        std::puts(error.what());
    }
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """A program of two files that include the header."""
    folder = tmp_path_factory.mktemp("cpu")
    (folder / "main.cpp").write_text(PROGRAM)
    (folder / "other.cpp").write_text(OTHER)
    command = [cxx(), *FLAGS, f"-I{kccl.include_dir()}", "main.cpp", "other.cpp", "-o", "program"]
    subprocess.run(command, check=True, cwd=folder)
    return folder / "program"


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("sum", "right"),
        ("throw", "on purpose"),
        ("late", "all_reduce_one_shot_ll16 on channel 0: peer 1 did not arrive; rank"),
        ("long", "has 128 bytes, must have at most 64, the max_bytes of its Options"),
        ("options", "channels, max_bytes, exchange_bytes and timeout_s must be positive"),
        ("threads", "no thread could be started for rank 2 of 3 (Resource temporarily unavailable"),
        ("world", "world_size is 9, must be between 1 and 8"),
    ],
)
def test_what_a_program_is_told(program, part, said):
    assert said in run(program, part)


@pytest.mark.long
def test_each_file_of_a_program_may_include_it(tmp_path):
    """clang gives some definitions to the linker that g++ keeps in the file: that of two files
    would be one too many.
    """
    source, target = tmp_path / "other.cpp", tmp_path / "other.o"
    source.write_text(OTHER)
    run(*aarch64.CXX, *FLAGS, f"-I{kccl.include_dir()}", "-c", source, "-o", target)
    with target.open("rb") as file:
        symbols = list(ELFFile(file).get_section_by_name(".symtab").iter_symbols())
    strong = [
        symbol.name
        for symbol in symbols
        if symbol["st_info"]["bind"] == "STB_GLOBAL" and symbol["st_shndx"] != "SHN_UNDEF"
    ]
    assert len(strong) == 1 and "3own" in strong[0], strong


@pytest.mark.long
def test_the_example_runs(tmp_path):
    # Why -O0: optimising takes longer than all else, and `program` is optimised.
    run(cxx(), *FLAGS, "-O0", f"-I{kccl.include_dir()}", EXAMPLE, "-o", tmp_path / "example")
    assert run(tmp_path / "example") == "4 ranks: 100 sums of 1000 floats are right\n"


@pytest.mark.long
def test_cmake_builds_the_example(tmp_path):
    cxx()
    (tmp_path / "CMakeLists.txt").write_text(f"""
cmake_minimum_required(VERSION 3.25)
project(example LANGUAGES CXX)
find_package(kccl CONFIG REQUIRED)
add_executable(example {EXAMPLE})
target_link_libraries(example PRIVATE kccl::cpu)
""")
    configure(tmp_path / "out", tmp_path)
    run(tool("cmake"), "--build", tmp_path / "out")
    assert "are right" in run(tmp_path / "out" / "example")
