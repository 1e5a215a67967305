"""Memory for GPUs, as far as it needs none."""

from kccl import gpu, gpu_memory


def test_communicators_of_a_device_share_a_stream_for_copies(monkeypatch):
    """Once a context has used 16 streams, its kernels begin later."""
    calls = []
    monkeypatch.setattr(gpu, "call", lambda name, *args: calls.append(name) or len(calls))
    first, other = (gpu.Device(k, "a GPU", f"uuid {k}", "sm_90a", 132, 7) for k in (61, 62))
    streams = [gpu_memory.copy_stream(where) for where in (first, other, first, other)]
    assert streams[:2] == streams[2:] and calls.count("cuStreamCreate") == 2
