"""The HIP runtime of the tests' own. One process drives GPUs of one vendor, and other tests drive
NVIDIA's. So these tests run where no others do: in `pytest tests/hip`, which
tests/gpu/test_hip_backend.py starts.
"""

import gc
from pathlib import Path

import hip_matrix
import hip_runtime
import pytest

from kccl.gpu import driver, memory, release, vendors
from kccl.gpu.hip import HIP
from kccl.tools import warm

HERE = Path(__file__).parent
_NO_DEVICE = 100


def pytest_ignore_collect(config):
    is_alone = all(Path(arg.split("::")[0]).resolve().is_relative_to(HERE) for arg in config.args)
    return None if is_alone else True


@pytest.fixture
def amd(monkeypatch):
    """This process drives the GPUs of the tests' HIP runtime, through hip-python. The value is the
    module hip_runtime.
    """
    pytest.importorskip("hip", reason="hip-python is not installed")
    hip_runtime.load()
    told = []

    def fail(function, code):
        told.append(function)
        hip_runtime.fail(function, code)

    monkeypatch.setattr(vendors, "_chosen", None)
    monkeypatch.setattr(memory, "_streams", {})
    # Few tests need more kernels than they call, and the simulator's compiler takes its time.
    monkeypatch.setenv("KCCL_PRELOAD", "none")
    driver.device.cache_clear()
    hip_runtime.quicken()
    hip_runtime.fail("hipInit", 0)
    driver.choose(HIP)
    yield fail
    for function in told:
        hip_runtime.fail(function, 0)
    gc.collect()
    release.drain()
    driver.device.cache_clear()
    # Outside of these tests there is no AMD GPU.
    vars(HIP).pop("binding", None)
    hip_runtime.fail("hipInit", _NO_DEVICE)


@pytest.fixture(scope="session")
def kernels_are_warm():
    """Compiles the kernels of the matrix on all cores."""
    pytest.importorskip("hip", reason="hip-python is not installed")
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in hip_runtime.environment().items():
            patch.setenv(variable, value)
        warm.warm(hip_matrix.instances(), "gfx942")
