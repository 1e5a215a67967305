"""The program of NCCL's that libkccl_nccl.so is tested with (linking/ranks_of_nccl.cpp)."""

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from compilers import cxx
from source_tree import ROOT

import kccl
from kccl.interop import nccl, nccl_headers

LINKING = ROOT / "tests" / "linking"
SOURCES = ("ranks_of_nccl.cpp", "ranks_of_nccl_graphs.cpp")
FLAGS = ("-std=c++20", "-O1", "-Wall", "-Wextra", "-Werror")


def compile_cpp(folder: Path, sources: tuple[Path | str, ...], output: str, *flags: object) -> None:
    """Compiles sources, of this folder or of tests/linking, which may use NCCL and the driver."""
    own = (kccl.include_dir(), ROOT / "csrc" / "host", nccl.HEADERS)
    system = (nccl_headers.folder_of("nccl.h"), nccl_headers.folder_of("cuda.h"))
    includes = [*(f"-I{each}" for each in own), *(f"-isystem{each}" for each in system)]
    paths = (LINKING / each for each in sources)
    subprocess.run([cxx(), *FLAGS, *includes, *paths, *flags, "-o", folder / output], check=True)


def compile_program(folder: Path, nccl_library: Path, driver: Path) -> None:
    """Compiles the program as `ranks`."""
    libraries = (nccl_library, driver, f"-Wl,-rpath,{nccl_library.parent}", "-pthread")
    compile_cpp(folder, SOURCES, "ranks", *libraries)


def told(
    folder: Path,
    part: str,
    ranks: int = 2,
    *,
    preloads: bool = True,
    code: int = 0,
    **variables: str,
) -> tuple[list[str], list[str]]:
    """What the ranks say of themselves, and the lines of the log."""
    preloaded = {"LD_PRELOAD": str(folder / nccl.LIBRARY)} if preloads else {}
    # Whoever runs the tests may have set some.
    outer = {name: os.environ[name] for name in os.environ if not re.match("(K|N)CCL_", name)}
    own = {"KCCL_NCCL": "log", "KCCL_TIMEOUT": "30"}
    try:
        done = subprocess.run(
            [folder / "ranks", part, str(ranks)],
            env=outer | own | preloaded | variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
    except subprocess.TimeoutExpired as error:
        output = b"".join(each or b"" for each in (error.stdout, error.stderr))
        pytest.fail(f"part {part} did not end:\n{output.decode(errors='replace')}")
    assert done.returncode == code, done.stdout + done.stderr
    assert "leaked" not in done.stderr or code != 0
    return sorted(done.stdout.splitlines()), done.stderr.splitlines()


def right(ranks: int = 2) -> list[str]:
    return [f"rank {rank}: right" for rank in range(ranks)]


def makers(log: list[str]) -> Counter[str]:
    """How many calls of rank 0 each kernel made, and how many NCCL, by KCCL's log."""
    calls = (re.match(r"kccl: rank 0 of \d: nccl\w+, \d+ of \w+: (\w+)", line) for line in log)
    return Counter(call[1] for call in calls if call)
