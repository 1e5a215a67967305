"""Tests that need a GPU: each is skipped, with the reason, where there is none.

    python3 -m pytest tests/gpu

needs cuda.bindings, NVRTC, PyTorch and CuPy, and as many GPUs as a test has ranks.
"""

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from kccl import gpu
from kccl.cuda_library import compile_kernel
from kccl.errors import BackendError

# oracle.py and ranks.py.
sys.path.insert(0, str(Path(__file__).parents[1]))
HERE = Path(__file__).parent


def num_gpus():
    """How many GPUs there are, and why there are none."""
    try:
        return gpu.num_devices(), "no GPU"
    except BackendError as error:
        return 0, str(error)


def pytest_collection_modifyitems(items):
    count, reason = num_gpus()
    for item in items:
        if HERE not in item.path.parents:
            continue
        wanted = 1
        if "world_size" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec"):
            wanted = item.callspec.params.get("world_size", 1)
        if count < wanted:
            why = reason if count == 0 else f"needs {wanted} GPUs, there are {count}"
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """A failure is told at once too: `make gpu` may end the run before its summary."""
    if report.failed:
        print(f"\n{report.longreprtext[-3000:]}", file=sys.__stdout__, flush=True)


@pytest.fixture(scope="session")
def compiled():
    """Makes the cache warm, by as many processes as there are cores: compiled(requests)."""

    def compile_all(requests):
        with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
            list(pool.map(compile_kernel, *zip(*requests, strict=True)))

    return compile_all
