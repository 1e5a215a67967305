"""What KCCL asks of AMD's driver, with a fake library."""

import ctypes
from types import SimpleNamespace

import pytest

from kccl.gpu import hip
from kccl.tools.checks import gpus


def fake(monkeypatch, *, init=0, count=0):
    """AMD's library with 3 GPUs, whose functions return these codes."""

    def device_count(number):
        number._obj.value = 3
        return count

    library = SimpleNamespace(hipInit=lambda flags: init, hipGetDeviceCount=device_count)
    monkeypatch.setattr(ctypes, "CDLL", {hip.LIBRARY: library}.__getitem__)


def test_gpus_are_counted_but_not_used(monkeypatch):
    fake(monkeypatch)
    assert hip.num_devices() == 3
    found = gpus.hip()
    assert (found.status, found.found) == ("no", "libamdhip64.so: 3 GPUs")
    assert 'backend="host"' in found.cure


@pytest.mark.parametrize(
    ("codes", "name"), [({"init": 100}, "hipInit"), ({"count": 100}, "hipGetDeviceCount")]
)
def test_a_driver_that_fails_is_named_with_its_code(monkeypatch, codes, name):
    fake(monkeypatch, **codes)
    found = gpus.hip()
    assert (found.status, found.found) == ("no", f"libamdhip64.so: {name} failed with code 100")
    assert "device files" in found.cure


def test_a_missing_driver_can_be_installed(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    found = gpus.hip()
    assert (found.status, found.found) == ("no", "libamdhip64.so: cannot open shared object file")
    assert "Install ROCm" in found.cure
