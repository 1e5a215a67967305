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


def pytest_addoption(parser):
    parser.addoption("--lane", metavar="I/N", help="of N runs side by side the I-th")


def in_lane(items, lane):
    """The tests of a lane. Those of a file and world size stay together: they share slow work."""
    number, lanes = map(int, lane.split("/"))
    groups = {}
    for item in items:
        groups.setdefault((item.path, world_size_of(item)), []).append(item)
    lengths = [0] * lanes
    mine = []
    for group in sorted(groups.values(), key=len, reverse=True):
        shortest = lengths.index(min(lengths))
        lengths[shortest] += len(group)
        mine += group if shortest == number - 1 else []
    return [item for item in items if item in mine]


def world_size_of(item):
    if "world_size" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec"):
        return item.callspec.params.get("world_size", 1)
    return 1


def pytest_collection_modifyitems(config, items):
    lane = config.getoption("lane", None)
    if lane:
        mine = in_lane(items, lane)
        config.hook.pytest_deselected(items=[item for item in items if item not in mine])
        items[:] = mine
    count, reason = num_gpus()
    for item in items:
        if HERE not in item.path.parents:
            continue
        wanted = world_size_of(item)
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
