"""Tests that need a GPU: they are left out, with the reason, where there is none.

    python3 -m pytest tests/hardware

needs cuda.bindings, NVRTC, PyTorch and CuPy, and as many GPUs as a test has ranks. Under
pytest-xdist, `-n 2 --dist loadgroup`, each worker has its own GPUs (tests/conftest.py).
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from limits import AT_MOST_S, TIMES_AS_LONG
from without_gpu import leave_out

from kccl import gpu
from kccl.base.errors import BackendError

# oracle.py and ranks.py.
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
HERE = Path(__file__).parent
# In these files the tests of one world size share slow work.
SHARING = ("test_collectives", "test_gpu_in_kernel", "test_gpu_linking", "test_gpu_publish")
SHARING += ("test_modules",)
IS_SIDE_BY_SIDE = "PYTEST_XDIST_WORKER" in os.environ


@cache
def is_here(path):
    """Whether a file of tests is one of this folder. Thousands of tests ask."""
    return HERE in path.parents


def num_gpus():
    """The number of GPUs, and why there are none."""
    try:
        return gpu.num_devices(), "no GPU"
    except BackendError as error:
        return 0, str(error)


def pytest_addoption(parser):
    parser.addoption(
        "--world-sizes",
        metavar="N,...",
        help="run only tests with so many ranks; a test without a world size counts as one rank",
    )
    parser.addoption(
        "--most-of",
        type=int,
        metavar="N",
        help="of tests that differ only in the number of ranks, run the one with most, up to N",
    )


def world_size_of(item):
    if "world_size" in getattr(item, "fixturenames", ()) and hasattr(item, "callspec"):
        return item.callspec.params.get("world_size", 1)
    return 1


def kind_of(item):
    """A key that is equal for tests that differ only in the number of ranks."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    others = sorted((name, repr(value)) for name, value in params.items() if name != "world_size")
    return item.path, getattr(item, "originalname", item.name), tuple(others)


def is_chosen(config, items):
    """A function that says whether the options choose an item."""
    wanted = config.getoption("world_sizes", None)
    sizes = set(map(int, wanted.split(","))) if wanted else None
    limit = config.getoption("most_of", None) or 0
    most = {}
    for item in items:
        if world_size_of(item) <= limit:
            most[kind_of(item)] = max(most.get(kind_of(item), 0), world_size_of(item))

    def chosen(item):
        size = world_size_of(item)
        is_most = not most or most.get(kind_of(item), size) == size
        return (sizes is None or size in sizes) and is_most

    return chosen


# First, because pytest-xdist reads the groups' marks in its own hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    chosen = is_chosen(config, [item for item in items if is_here(item.path)])
    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = [item for item in items if chosen(item)]
    count, reason = num_gpus()
    of_gpus = [item for item in items if is_here(item.path)]
    if of_gpus and not count and not config.option.collectonly:
        leave_out(config, of_gpus, reason)
        items[:] = [item for item in items if not is_here(item.path)]
        return
    for item in of_gpus:
        wanted = world_size_of(item)
        if item.path.stem in SHARING:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}_{wanted}"))
        if count < wanted:
            reason = f"needs {wanted} GPUs, there are {count}"
            item.add_marker(pytest.mark.skip(reason=reason))
        # The first test of a module compiles its kernels.
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.takes(AT_MOST_S / TIMES_AS_LONG))


@pytest.fixture(scope="session", autouse=True)
def _long_work_has_begun(request):
    """Starts slow work before the first test, so that the tests that need it wait less."""
    if not num_gpus()[0] or request.config.getoption("collectonly"):
        return
    import preloaded

    preloaded.begin()
    # Only one worker of pytest-xdist runs the tests that need it, and no worker knows which.
    if IS_SIDE_BY_SIDE:
        return
    run = [item for item in request.session.items if not item.get_closest_marker("skip")]
    for name in ("programs", "publish_kernels"):
        if any(name in getattr(item, "fixturenames", ()) for item in run):
            request.getfixturevalue(name)


@pytest.fixture(scope="session")
def programs(tmp_path_factory):
    """See linked_programs.start()."""
    import linked_programs

    with ThreadPoolExecutor() as pool:
        yield linked_programs.start(pool, tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def publish_kernels():
    """compiled() waits for publish_rounds.compiled() in another process, and returns its module."""
    import publish_rounds

    where = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = "import publish_rounds; publish_rounds.compiled()"
    with subprocess.Popen([sys.executable, "-c", program], env=where) as process:

        def compiled():
            assert process.wait(100) == 0
            return publish_rounds.compiled()

        try:
            yield compiled
        finally:
            process.kill()


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report):
    """Prints a failure at once, because `make gpu` may end the run before the summary."""
    if report.failed and not IS_SIDE_BY_SIDE:
        print(f"\n{report.longreprtext[-3000:]}", file=sys.__stdout__, flush=True)
