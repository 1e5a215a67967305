"""The kernels of `kccl topo --probe` compile for NVIDIA's GPUs. No GPU is needed."""

import re

import pytest
from compiled_kernels import INCLUDE, needs_nvrtc
from device_compilers import compile_cuda, find_nvrtc, ptx_entries

from kccl.tools.gpu_probe import within

pytestmark = [pytest.mark.takes(14), needs_nvrtc]


def test_every_kernel_compiles_and_clusters_have_their_size():
    ptx, log = compile_cuda(
        find_nvrtc(), within.SOURCE.read_text(), list(within.KERNELS), "sm_90a", INCLUDE
    )
    entries = ptx_entries(ptx)
    found = {}
    for symbol in entries:
        length, name = re.match(r"_Z(\d+)(\w+)", symbol).groups()
        found[name[: int(length)]] = symbol
    assert set(found) == set(within.KERNELS)
    assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}
    for size in within.CLUSTERS:
        (head,) = re.findall(rf"{found[f'probe_clusters_{size}']}\([^{{]*", ptx)
        assert re.search(rf"\.reqnctapercluster {size}\b", head)
    # One thread polls and loads past its SM's own cache.
    for name in ("probe_units", "probe_lines", "probe_polls"):
        assert "ld.relaxed.gpu.global.u32" in entries[found[name]]
