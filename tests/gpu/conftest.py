import gc

import pytest
from made_up_vendor import MadeUp

from kccl.gpu import driver, memory, release, vendors


@pytest.fixture
def toys(monkeypatch):
    """This process drives the GPUs of the vendor that is made up. The value is its driver."""
    made_up = MadeUp()
    monkeypatch.setattr(vendors, "_chosen", None)
    monkeypatch.setattr(memory, "_streams", {})
    driver.device.cache_clear()
    assert driver.choose(made_up) is driver.table() is made_up
    yield made_up.binding
    # What the test dropped must be released by this driver.
    gc.collect()
    release.drain()
    driver.device.cache_clear()
