import gc
import threading
from types import SimpleNamespace

import pytest
from made_up_vendor import MadeUp
from stream_world import CONTEXT, Driver

import kccl
from kccl.backends import gpu as on_gpus
from kccl.backends import on_device
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


@pytest.fixture
def toy_ranks(toys, monkeypatch):
    """Runs main(comm) in threads as ranks, on GPUs of that vendor, where kernels do nothing."""
    table, launches = driver.table(), Driver()
    monkeypatch.setattr(table, "backend", "cuda")
    monkeypatch.setitem(driver.VENDORS, "cuda", table)
    monkeypatch.setattr(table, "function_attribute", lambda function, name: 1024)
    monkeypatch.setattr(driver, "can_access", lambda a, b: True)
    entry = SimpleNamespace(function=lambda: 0)
    monkeypatch.setattr(on_gpus, "library_kernel", lambda *args, **how: entry)
    monkeypatch.setattr(on_gpus, "occupancy", lambda *args: 100)
    small = {"num_channels": 2, "blocks_per_channel": 1, "packet_bytes": 4096}
    monkeypatch.setattr(on_device, "SIZES", on_device.SIZES | small | {"staging_bytes": 65536})
    monkeypatch.setenv("KCCL_PRELOAD", "none")

    def run(main, world_size=1):
        def of_rank(comm):
            queue = comm._backend.state.queue
            for name in ("launch", "launch_graph", "is_capturing", "push_context", "pop_context"):
                setattr(queue, name, getattr(launches.queue, name))
            queue.context = CONTEXT
            return main(comm)

        found = kccl.run_threads(of_rank, world_size, backend="cuda")
        # What a rank's thread refers to must be dropped while this vendor is there.
        for thread in threading.enumerate():
            if thread.name.startswith("kccl rank"):
                thread.join()
        return found

    return run
