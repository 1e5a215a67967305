import gc

import hip_runtime
import pytest

from kccl.gpu import driver, memory, release, vendors
from kccl.gpu.hip import HIP

_NO_DEVICE = 100


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
    monkeypatch.setattr(driver, "_opened", [])
    monkeypatch.setattr(memory, "_streams", {})
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
