"""Every kernel of the host with ranks as threads under ThreadSanitizer, AddressSanitizer and UBSan.

A third build carries a planted bug that ThreadSanitizer must find: a check must be able to fail.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import collectives
import pytest
from compilers import CXX
from moves import table_of
from source_tree import replace_once

import kccl
from kccl.base import abi
from kccl.base.dtypes import ALL as every_dtype
from kccl.csrc.host.kernel_table import kernel_table
from kccl.plan.spec import needs_floats
from kccl.plan.specs import KERNELS, SPECS

CSRC = Path(kccl.include_dir()).parent
DRIVER = Path(__file__).parent / "sanitize" / "ranks_as_threads.cpp"
SOURCES = ("core", "idle", "messages", "chain", "postings", "routes", "far_link", "nodes", "probe")
SOURCES += ("kernels_baseline",)
COMMON = ["-std=c++20", "-g", "-ffp-contract=off", "-pthread", "-Wall", "-Wextra"]
# Why -O0: with both, optimising takes long.
ADDRESS = ["-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
THREAD = ["-O1", "-fsanitize=thread"]
# World sizes of its runs are 2 to this one.
MOST_RANKS = 4
OPTIONS = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}

# Three builds and their runs, on two cores that others may be using too.
pytestmark = [pytest.mark.long, pytest.mark.takes(30)]


def _works(compiler: str, folder: Path) -> bool:
    """Whether a program with ThreadSanitizer builds and runs; some kernels' ASLR defeats it."""
    source = folder / "empty.cpp"
    source.write_text("int main() { return 0; }\n")
    built = subprocess.run([compiler, *THREAD, source, "-o", folder / "empty"], capture_output=True)
    return built.returncode == 0 and subprocess.run([folder / "empty"]).returncode == 0


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("works")
    for name in CXX:
        if _works(name, folder):
            return name
    pytest.skip(f"no compiler with a working ThreadSanitizer; found {CXX or 'none'}")


# They need the queues that Python opens for a communicator.
OF_MESSAGES = ("send", "recv")


def kernels_h() -> str:
    """The kernels that the host has, for sanitize/ranks_as_threads.cpp."""
    specs = [spec for spec in KERNELS if "host" in spec.targets and spec.name not in OF_MESSAGES]
    specs = [spec for spec in specs if spec.takes_type is None]  # those share no memory
    lines = [f"constexpr int kKernels[] = {{{', '.join(spec.constant for spec in specs)}}};"]
    algorithms = [spec for spec in specs if spec in SPECS]
    lines.append('#include "collective.h"')
    moved = {name: collectives.load(name).MOVES for name in collectives.NAMES}
    moved = {name: moves for name, moves in moved.items() if moves is not None}
    lines += [table_of(name, moves, MOST_RANKS) for name, moves in moved.items()]
    lines.append("constexpr Algorithm kAlgorithms[] = {")
    for spec in algorithms:
        moves = f"&kMovesOf_{spec.collective}" if spec.collective in moved else "nullptr"
        only_floats = "true" if needs_floats in spec.needs else "false"
        lines.append(f"    {{{spec.constant}, {moves}, {only_floats}}},")
    return "\n".join((*lines, "};", ""))


def _let_functions_be_called(csrc: Path) -> None:
    """Takes "always" from "always inline": device functions are compiled once, and not once for
    each call. Compilers take a tenth of the time, and sanitizers see the same accesses.
    """
    header = csrc / "include" / "kccl" / "platform.cuh"
    text, right = (
        header.read_text(),
        "\n#define KCCL_DEVICE inline __attribute__((always_inline))\n",
    )
    before, found, after = text.rpartition(right)
    assert found, header.name
    header.write_text(f"{before}\n#define KCCL_DEVICE inline\n{after}")


def build_program(
    compiler: Sequence[str],
    folder: Path,
    flags: list[str],
    dtypes: tuple[str, ...],
    spoil: Callable[[Path], None] | None = None,
) -> Path:
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    _let_functions_be_called(csrc)
    # Only these types, because each takes a second to compile.
    table = kernel_table(dtype for dtype in every_dtype if dtype.name in dtypes)
    (folder / "kernel_table.inc").write_text(table)
    if spoil is not None:
        spoil(csrc)
    numbers = ", ".join(str(abi.DTYPES[dtype]) for dtype in dtypes)
    (folder / "dtypes.h").write_text(f"constexpr int kDtypes[] = {{{numbers}}};\n")
    (folder / "kernels.h").write_text(kernels_h())
    program = folder / "ranks_as_threads"
    sources = [DRIVER, *(csrc / "host" / f"{name}.cpp" for name in SOURCES)]
    command = [
        *compiler,
        *COMMON,
        *flags,
        f"-I{folder}",
        f"-I{DRIVER.parent}",
        *sources,
        "-o",
        program,
    ]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return program


def _build_and_run(compiler: str, *build: Any) -> subprocess.CompletedProcess[str]:
    program = build_program([compiler], *build)
    return subprocess.run([program], capture_output=True, text=True, env=os.environ | OPTIONS)


def _plant_a_race(csrc: Path) -> None:
    """Lets kernels that pull say "written" without ordering what they wrote."""
    header = csrc / "include" / "kccl" / "same_call.cuh"
    right, wrong = (
        f"arrive<mem::Order::{order}>(kKcclFlagWritten" for order in ("kRelease", "kRelaxed")
    )
    header.write_text(replace_once(header.read_text(), right, wrong, header.name))


@pytest.fixture(scope="module")
def runs(
    compiler: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, "Future[subprocess.CompletedProcess[str]]"]:
    """All builds, started in parallel."""
    builds = {
        "address": (ADDRESS, ("float32", "int8")),
        "thread": (THREAD, ("float32",)),
        "planted": (THREAD, ("float32",), _plant_a_race),
    }
    with ThreadPoolExecutor(2) as pool:
        return {
            name: pool.submit(_build_and_run, compiler, tmp_path_factory.mktemp(name), *build)
            for name, build in builds.items()
        }


def test_the_program_has_no_list_of_algorithms_of_its_own():
    """So a new algorithm is run without an edit there."""
    named = set(re.findall(r"\bkKccl\w+", DRIVER.read_text()))
    assert named & {spec.constant for spec in SPECS} == {"kKcclBarrierDirect"}


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_results_are_right_and_the_sanitizer_is_silent(sanitizer, runs):
    run = runs[sanitizer].result()
    assert run.stderr == ""
    assert run.returncode == 0
    assert run.stdout == "all results are right\n"


def test_a_planted_race_is_found(runs):
    run = runs["planted"].result()
    assert run.returncode != 0
    assert "ThreadSanitizer: data race" in run.stderr
    assert "_simple.cuh" in run.stderr
