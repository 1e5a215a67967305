"""What is compiled ahead of time for the benches on GPUs."""

from pathlib import Path

import numpy as np
import pytest

from kccl import jit
from kccl.bench import gpu_kernels, gpu_warm, in_kernel, in_kernel_side
from kccl.bench.collective import load

ARCH = "sm_90a"


def test_it_is_what_the_benches_compile():
    found = {(str(source), *names) for source, names, _ in gpu_warm.modules([1, 4])}
    assert (gpu_kernels.SOURCE, *gpu_kernels.NAMES) in found
    for world_size in (1, 4):
        for collective in in_kernel.FORMS:
            (given, *_) = load(collective).problems(
                [64],
                dtype="bfloat16",
                np_dtype=np.dtype(np.uint16),
                op="sum",
                root=0,
                in_place=True,
                world_size=world_size,
            )
            dtype = given.dtype if gpu_warm.takes_type(collective) else None
            source, names = in_kernel_side.kernels_of(collective, dtype, world_size)
            assert len(names) > 1 and (str(source), *names) in found
        peers, names, _ = in_kernel_side.kernels_of_peers(world_size)
        assert (str(peers), *names) in found


def test_what_does_not_compile_is_left_to_the_bench(tmp_path, monkeypatch, capsys):
    pytest.importorskip("cuda.bindings.nvrtc")
    wrong = tmp_path / "wrong.cuh"
    wrong.write_text("nonsense")
    modules = [(gpu_kernels.SOURCE, gpu_kernels.NAMES, ()), (wrong, ["nothing"], ())]
    monkeypatch.setattr(gpu_warm, "modules", lambda world_sizes: iter(modules))
    monkeypatch.setenv("KCCL_CACHE", str(tmp_path / "cache"))
    assert gpu_warm.main(["-n", "2", "--arch", ARCH]) == 0
    assert capsys.readouterr().out == "1 of 2 modules\n"
    assert len(list(Path(jit.cache_folder()).glob("*/*.cubin"))) == 1
