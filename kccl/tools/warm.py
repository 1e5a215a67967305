"""Compiles KCCL's kernels for GPUs ahead of time, so that a program's first calls are fast.

kccl.init() loads the kernels that are in the cache. So no call has to load one later, while other
ranks wait. A kernel takes about a second to compile. A communicator needs one for each algorithm,
element type and operator that it uses. With --arch no GPU is needed to compile. A program finds the
kernels if it has the same KCCL_CACHE, the same KCCL in the same folder, and the same compiler.
"""

import argparse
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from pathlib import Path

from ..base import abi
from ..base.errors import BackendError, InvalidArgument
from ..bench import names as bench_names
from ..gpu import driver
from ..gpu.instances import ELEMENT_TYPES, Instance, instances
from ..gpu.library import compile_kernel
from ..jit import cache
from ..plan.ops import OPS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments to its parser."""
    parser.add_argument(
        "-n", type=int, nargs="+", required=True, metavar="N", help="numbers of ranks, as in 2 4"
    )
    parser.add_argument(
        "-d",
        type=bench_names.dtype_name,
        nargs="+",
        default=ELEMENT_TYPES,
        metavar="TYPE",
        help=f"element types ({', '.join(ELEMENT_TYPES)})",
    )
    parser.add_argument("--op", nargs="+", metavar="OP", help="operators (all)")
    parser.add_argument("--arch", default="", help="as in sm_90a (that of the first GPU here)")
    parser.epilog = (
        "They are found by programs with the same KCCL_CACHE, the same KCCL in the same folder, "
        "and the same NVRTC."
    )


def main(args: argparse.Namespace) -> int:
    """Runs `kccl warm`: compiles the kernels that its arguments choose.

    Raises:
        InvalidArgument: An argument is wrong.
        BackendError: The compiler is not installed, or no architecture is given and there is no
            GPU.
    """
    for count in args.n:
        if not 1 <= count <= abi.MAX_WORLD_SIZE:
            raise InvalidArgument(f"-n is {count}, must be 1 to {abi.MAX_WORLD_SIZE}")
    for op in args.op or ():
        if op not in OPS:
            raise InvalidArgument(f"--op is {op!r}, must be one of {', '.join(OPS)}")
    wanted = instances(args.n, args.d, args.op or OPS)
    try:
        arch = args.arch or driver.device(0).arch
    except BackendError as error:
        raise BackendError(f"{error}; or name the architecture: --arch sm_90a") from error
    print(f"{len(wanted)} kernels for {arch} in {cache.cache_folder()}", flush=True)
    began = time.monotonic()
    warm(wanted, arch)
    print(f"{time.monotonic() - began:.1f} s")
    return 0


def warm(wanted: Sequence[Instance], arch: str = "") -> list[Path]:
    """Compiles the kernels that are not in the cache, in one process on each core.

    Args:
        wanted: Kernels from instances(); at least one.
        arch: The architecture to compile for, as "sm_90a" or "gfx942"; "" for that of the first
            GPU here.

    Returns:
        The kernels' entries in the cache, in the order of `wanted`.

    Raises:
        InvalidArgument: The compiler does not know the architecture, or KCCL compiles for another
            one on these GPUs.
        BackendError: The compiler is not installed, or arch is "" and there is no GPU.
    """
    arch = arch or driver.device(0).arch
    theirs = driver.vendor_of(arch).arch_for(arch)
    if arch != theirs:
        raise InvalidArgument(
            f"arch is {arch!r}, must be {theirs!r}: KCCL compiles for that on these GPUs"
        )
    num_cores = len(os.sched_getaffinity(0))
    # Spawned and not forked, because this process may have threads.
    with ProcessPoolExecutor(min(num_cores, len(wanted)), get_context("spawn")) as pool:
        # The new processes inherit the mask, so Ctrl-C reaches only this process, which ends them.
        with _interrupts_blocked():
            entries = [pool.submit(compile_kernel, *each, arch) for each in wanted]
        try:
            return [entry.result() for entry in entries]
        except Exception:
            pool.shutdown(cancel_futures=True)
            raise
        except BaseException:
            for process in active_children():
                process.terminate()
            raise


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
