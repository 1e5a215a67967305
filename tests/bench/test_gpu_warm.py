"""What is compiled ahead of time for the benches on GPUs."""

from pathlib import Path

import numpy as np
import pytest

from kccl.bench.collectives import NAMES, load
from kccl.bench.gpu import kernels
from kccl.bench.gpu import warm as gpu_warm
from kccl.bench.in_kernel import side
from kccl.jit import cache
from kccl.tools import warm

pytestmark = pytest.mark.takes(14)

ARCH = "sm_90a"


def test_it_is_what_the_benches_compile():
    found = {(str(source), *names) for source, names, _ in gpu_warm.modules([1, 4])}
    assert (kernels.SOURCE, *kernels.NAMES) in found
    for world_size in (1, 4):
        for collective in filter(lambda each: each.forms, map(load, NAMES)):
            (given, *_) = collective.problems(
                [64],
                dtype="bfloat16",
                np_dtype=np.dtype(np.uint16),
                op="sum",
                root=0,
                in_place=True,
                world_size=world_size,
            )
            dtype = given.dtype if gpu_warm.takes_type(collective) else None
            source, names = side.kernels_of(collective, dtype, world_size)
            assert len(names) > 1 and (str(source), *names) in found
        peers, names, _ = side.kernels_of_peers(world_size)
        assert (str(peers), *names) in found


@pytest.fixture
def own(tmp_path, monkeypatch):
    """own(modules): makes these the modules of the benches."""
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv("KCCL_CACHE", str(tmp_path / "cache"))
    return lambda *modules: monkeypatch.setattr(gpu_warm, "modules", lambda sizes: iter(modules))


FEW = ["-n", "2", "--arch", ARCH, "-d", "bfloat16", "--op", "sum"]


@pytest.mark.long
def test_the_librarys_kernels_too_and_what_does_not_compile_is_left_to_the_bench(
    own, tmp_path, capfd
):
    wrong = tmp_path / "wrong.cuh"
    wrong.write_text("nonsense")
    own((kernels.SOURCE, kernels.NAMES, ()), (wrong, ["nothing"], ()))
    assert gpu_warm.main(FEW) == 0
    printed = capfd.readouterr().out
    count = len(warm.instances([2], ["bfloat16"], ["sum"]))
    assert f"{count} kernels for {ARCH}" in printed and "1 of 2 modules\n" in printed
    assert len(list(Path(cache.cache_folder()).glob("*/*.cubin"))) == count + 1


def test_an_argument_that_kccl_warm_refuses_is_a_failure(own, capfd):
    own((kernels.SOURCE, kernels.NAMES, ()))
    assert gpu_warm.main([*FEW, "nonsense"]) != 0
    assert "nonsense" in capfd.readouterr().err
