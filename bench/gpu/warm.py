"""Compiles what `kccl bench --backend cuda` needs, ahead of time and on all cores.

    python3 -m kccl.bench.gpu.warm -n 1 2 4 -d bfloat16 --op sum

Its own modules, each of which takes seconds, and at the same time the library's kernels, which
`kccl warm` compiles: further arguments are its own. A module that does not compile is left to its
bench, which says so.
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

from ..in_kernel.contenders import FORMS
from ..in_kernel.side import kernels_of, kernels_of_peers
from .kernels import NAMES, SOURCE

DTYPES = ("bfloat16", "float32")

Module = tuple[Any, Sequence[str], Sequence[Path]]
"""Source, names of its kernels, folders of headers besides."""


def modules(world_sizes: Sequence[int], dtypes: Sequence[str] = DTYPES) -> Iterator[Module]:
    """Those of the benches, outside and inside kernels.

    Args:
        world_sizes: Numbers of ranks.
        dtypes: Element types.
    """
    yield SOURCE, NAMES, ()
    for world_size in world_sizes:
        yield kernels_of_peers(world_size)
        for collective in FORMS:
            for dtype in dtypes if takes_type(collective) else (None,):
                yield (*kernels_of(collective, dtype, world_size), ())


def takes_type(collective: str) -> bool:
    """Whether its kernels are made for an element type."""
    return any("{type}" in form.kernel for form in FORMS[collective])


def main(argv: Sequence[str] | None = None) -> int:
    """Compile them."""
    parser = argparse.ArgumentParser(prog="python -m kccl.bench.gpu.warm", description=__doc__)
    parser.add_argument("-n", type=int, nargs="+", required=True, metavar="N", help="ranks")
    parser.add_argument("--arch", default="", help="as in sm_90a (that of the first GPU here)")
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
        kccl.compile(source, names, target="cuda", arch=arch, include_dirs=folders)
        return True
    return False


if __name__ == "__main__":
    raise SystemExit(main())
