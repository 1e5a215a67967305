"""Compiles what `kccl bench --backend cuda` or `hip` needs, ahead of time and on all cores.

    python3 -m kccl.bench.gpu.warm -n 1 2 4 -d bfloat16 --op sum

It compiles the benches' modules, which take seconds each. At the same time `kccl warm` compiles the
library's kernels; all other arguments are passed to it. A module that does not compile is skipped:
the bench that needs it prints the error.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import kccl

from ..collectives import NAMES as COLLECTIVES
from ..collectives import load
from ..harness.collective import Collective
from ..in_kernel.side import kernels_of, kernels_of_peers
from .kernels import NAMES, SOURCE

DTYPES = ("bfloat16", "float32")

Module = tuple[Any, Sequence[str], Sequence[Path]]
"""Source, kernel names, additional include folders."""


def modules(world_sizes: Sequence[int], dtypes: Sequence[str] = DTYPES) -> Iterator[Module]:
    """Yields the modules of all benches on GPUs.

    Args:
        world_sizes: World sizes of the benches.
        dtypes: Element types of the benches.
    """
    yield SOURCE, NAMES, ()
    for world_size in world_sizes:
        yield kernels_of_peers(world_size)
        for collective in filter(lambda each: each.forms, map(load, COLLECTIVES)):
            for dtype in dtypes if takes_type(collective) else (None,):
                yield (*kernels_of(collective, dtype, world_size), ())


def takes_type(collective: Collective) -> bool:
    """Tells whether a collective's kernels depend on the element type."""
    return any("{type}" in form.kernel for form in collective.forms)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the kernels. Returns the exit code of `kccl warm`."""
    parser = argparse.ArgumentParser(
        prog="python -m kccl.bench.gpu.warm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", type=int, nargs="+", required=True, metavar="N", help="world sizes")
    parser.add_argument("--arch", default="", help="such as sm_90a or gfx942 (that of GPU 0)")
    args, further = parser.parse_known_args(argv)
    arch = args.arch or kccl.gpu.device(0).arch
    found = list(modules(args.n))
    world_sizes = map(str, args.n)
    command = (sys.executable, "-m", "kccl", "warm", "--arch", arch, "-n", *world_sizes, *further)
    num_cores = len(os.sched_getaffinity(0))
    with (
        subprocess.Popen(command) as library,
        ProcessPoolExecutor(min(num_cores, len(found)), get_context("spawn")) as pool,
    ):
        compiled = list(pool.map(_compile, *zip(*found, strict=True), [arch] * len(found)))
        print(f"{sum(compiled)} of {len(compiled)} modules", flush=True)
        return library.wait()


def _compile(source: Any, names: Sequence[str], folders: Sequence[Path], arch: str) -> bool:
    with suppress(kccl.CompileError):
        target = kccl.gpu.backend_of(arch)
        kccl.compile(source, names, target=target, arch=arch, include_dirs=folders)
        return True
    return False


if __name__ == "__main__":
    raise SystemExit(main())
