"""Builds libkccl_nccl.so, which answers NCCL's API and needs no Python (csrc/nccl).

    python -m kccl.interop.nccl --out build/nccl
    LD_PRELOAD=build/nccl/libkccl_nccl.so torchrun --nproc-per-node 2 program.py

To build it takes a C++ compiler, NVRTC, and the headers nccl.h and cuda.h: of a CUDA toolkit, or of
the wheels nvidia-nccl and nvidia-cuda-runtime.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ..base.errors import BackendError, CompileError, Error
from ..jit import cache, compilers
from . import nccl_headers, nccl_images, nccl_tables

LIBRARY = "libkccl_nccl.so"
_NCCL = cache.CSRC / "nccl"
HEADERS = _NCCL / "cuda"
"""The folder of what nccl.h needs of CUDA's runtime."""

# It answers NCCL's deprecated functions, too.
_FLAGS = (
    *("-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wno-deprecated-declarations"),
)
# The library goes into every process that a program starts, also where there is no C++ library.
_LINKED = (
    *("-shared", "-static-libstdc++", "-static-libgcc", "-ldl", "-pthread"),
    f"-Wl,-soname,{LIBRARY},--version-script={_NCCL / 'exports.map'}",
)


def build(
    folder: Path,
    *,
    archs: Sequence[str] = nccl_images.ARCHS,
    world_sizes: Sequence[int] = nccl_tables.WORLD_SIZES,
    flags: Sequence[str] = (),
) -> Path:
    """Builds the library.

    Args:
        folder: Where the library goes, and what is written to build it.
        archs: Architectures; those that begin with "compute_" become PTX.
        world_sizes: Numbers of ranks for which it has kernels.
        flags: More flags for the C++ compiler.

    Returns:
        The library's path.

    Raises:
        BackendError: A compiler or a header is missing.
        CompileError: The library does not compile.
    """
    _cxx()  # Whoever has none hears of it before the kernels, which take minutes.
    cuda, nccl = nccl_headers.folder_of("cuda.h"), nccl_headers.folder_of("nccl.h")
    sources = [*sorted(_NCCL.glob("*.cpp")), cache.CSRC / "host" / "gpu.cpp"]
    lines = nccl_tables.lines(world_sizes)
    images, image_bytes = nccl_images.images(lines, folder, archs)
    texts = {
        "forwards.inc": nccl_headers.forwards(nccl / "nccl.h", _NCCL / "entries.cpp"),
        "driver.inc": nccl_headers.driver(cuda / "cuda.h", _driver_users()),
        "plan.inc": nccl_tables.plan(lines),
        "sizes.inc": nccl_tables.sizes(),
        "images.inc": images,
        "image_bytes.inc": image_bytes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(partial(compile_source, folder, flags=flags), sources, objects))
    link(objects, folder / LIBRARY)
    return folder / LIBRARY


def compile_source(folder: Path, source: Path, made: Path, flags: Sequence[str] = ()) -> None:
    """Compiles one of the library's sources.

    Args:
        folder: Has what build() has written.
        source: It may lie anywhere.
        made: The object.
        flags: More flags for the compiler.
    """
    system = (nccl_headers.folder_of("nccl.h"), nccl_headers.folder_of("cuda.h"))
    includes = [f"-I{folder}", f"-I{_NCCL}", f"-I{HEADERS}"]
    for each in system:
        includes += ["-isystem", str(each)]
    _run([*_cxx(), *_FLAGS, *flags, *includes, "-c", str(source), "-o", str(made)])


def link(objects: Sequence[Path], library: Path) -> None:
    """Makes the library of its objects."""
    _run([*_cxx(), *map(str, objects), *_LINKED, "-o", str(library)])


def _cxx() -> list[str]:
    cxx = compilers.find_cxx()
    if cxx is None:
        raise BackendError(f"there is no C++ compiler. {cache.compiler_cure()}")
    return cxx


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        log = done.stderr.strip()
        raise CompileError(f"{LIBRARY} does not compile with {command[0]}:\n{log}", log=log)


def _driver_users() -> list[Path]:
    """Returns the files that call the driver by its functions' names."""
    headers = cache.CSRC / "include" / "kccl"
    return [
        headers / "host.hpp",
        headers / "host_team.hpp",
        *_NCCL.glob("*.h"),
        *_NCCL.glob("*.cpp"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Builds the library, and prints its path."""
    parser = argparse.ArgumentParser(prog="python -m kccl.interop.nccl", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/nccl"), help="the folder")
    parser.add_argument("--arch", action="append", help="an architecture; may be repeated")
    chosen = parser.parse_args(arguments)
    try:
        library = build(chosen.out, archs=chosen.arch or nccl_images.ARCHS)
        sys.stdout.write(f"{library}\n")
    except Error as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
