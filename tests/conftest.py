"""What the tests share: an environment of their own, and ranks that are processes."""

import gc
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from itertools import count
from pathlib import Path

import again
import budget
import pytest
from again import Again
from budget import Budget
from limits import Limits
from reading import FromTheEnd, begins_at_the_end
from skips import Complete
from slowest import Slowest
from without_gpu import WithoutGpu

WORKERS = Path(__file__).parent / "workers"


_cache = ""
_numbers = count()
_ENDS = (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD)


def pytest_addoption(parser):
    parser.addoption(
        "--complete",
        action="store_true",
        help="a test that skips itself fails, unless tests/support/skips.py has its reason",
    )
    again.add_options(parser)
    budget.add_options(parser)


def pytest_configure(config):
    """Gives the session its own cache of compiled kernels, unless KCCL_CACHE names one: that of
    `make gpu`, or, for a worker of pytest-xdist, that of the session.

    Without files or folders, pytest leaves the long tests out, as `make test` does.
    """
    global _cache
    if config.args_source is config.ArgsSource.TESTPATHS and not config.option.markexpr:
        config.option.markexpr = "not long and not mutation"
    # A job in the background of a shell ignores Ctrl-C, nohup ignores the end of its terminal, and
    # other programs block or take signals. So would all that the tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDS:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, *_ENDS})
    # readline tells the width of a terminal, or 80, to all that a pytest with workers starts.
    os.environ.pop("COLUMNS", None)
    # Open MPI and zig end without it.
    os.environ.setdefault("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    plugins = [Limits()]
    if config.option.complete:
        plugins.append(Complete())
    if config.option.seed or config.option.until:
        plugins.append(Budget(config.option.seed, config.option.until))
    if begins_at_the_end(config):
        plugins.append(FromTheEnd())
    # What a worker of pytest-xdist finds is shown by the process that started it.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(WithoutGpu(), "without_gpu")
        plugins.append(Slowest())
        if config.option.again:
            plugins.append(Again())
    for plugin in plugins:
        config.pluginmanager.register(plugin)
    if "KCCL_CACHE" not in os.environ:
        _cache = os.environ["KCCL_CACHE"] = tempfile.mkdtemp(prefix="kccl-tests-")
    os.environ.update(getattr(config, "workerinput", {}).get("gpus", {}))


def pytest_unconfigure():
    if _cache:
        shutil.rmtree(_cache, ignore_errors=True)
        del os.environ["KCCL_CACHE"]


# First, because pytest-xdist reads the groups' marks in its own hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """With `--dist loadgroup` one worker runs all tests of a file. The other ones do not wait for a
    kernel that its first test compiles, and fixtures of a module, which may take long, are set up
    once. Long tests without such a fixture go to any worker, because some files have many.
    """
    for item in items:
        scopes = {fixtures[-1].scope for fixtures in item._fixtureinfo.name2fixturedefs.values()}
        is_long = any(item.get_closest_marker(name) for name in ("long", "mutation"))
        is_grouped = item.get_closest_marker("xdist_group") is not None
        if not is_grouped and ("module" in scopes or not is_long):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is collected stays, so the garbage collector would look at it for nothing."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """Lets the garbage collector pass over what was collected: thousands of tests, and modules that
    stay. Many tests ask for a collection, which would take 0.4 s.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Gives each worker of pytest-xdist its own GPUs. On shared GPUs a kernel may wait for its peer
    until its time-out, because another worker's kernels occupy the peer's GPU.
    """
    from kccl import gpu
    from kccl.base.errors import BackendError
    from kccl.gpu import driver

    try:
        count = gpu.num_devices()
    except BackendError:
        return
    workers = node.workerinput["workercount"]
    number = int(node.workerinput["workerid"].removeprefix("gw"))
    each = count // workers
    if count and not each:
        raise pytest.UsageError(f"-n {workers} needs a GPU for each worker, and there are {count}")
    variable = driver.table().visible_devices
    visible = os.environ.get(variable, ",".join(map(str, range(count)))).split(",")
    node.workerinput["gpus"] = {variable: ",".join(visible[number * each : (number + 1) * each])}


@pytest.fixture
def tmp_path(request, tmp_path_factory):
    """A folder of the test's own. pytest looks at those of all earlier tests to find its number."""
    name = re.sub(r"\W", "_", request.node.name)[:25]
    folder = tmp_path_factory.getbasetemp() / f"{name}_{next(_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(autouse=True)
def environment(monkeypatch, tmp_path):
    """A folder and variables of the test's own, and waits that end before pytest's time-out."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith("KCCL_") and name != "KCCL_CACHE":
            monkeypatch.delenv(name)
    # Some tests start pytest, and read what it prints.
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("KCCL_TIMEOUT", "20")
    monkeypatch.setenv("KCCL_FIRST_TIMEOUT", "40")
    # Simulations under one seed, unless a test says which.
    monkeypatch.setenv("KCCL_SEEDS", "1")


@pytest.fixture
def mpirun():
    """mpirun(world_size, worker, *args): runs tests/workers/<worker>.py; returns its output."""

    def run(world_size, worker, *args):
        command = [
            Path(sys.executable).parent / "mpirun",
            *("-n", str(world_size), sys.executable, WORKERS / f"{worker}.py", *args),
        ]
        path = os.pathsep.join(
            [str(Path(__file__).parent / "support"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        done = subprocess.run(
            [str(word) for word in command],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run
