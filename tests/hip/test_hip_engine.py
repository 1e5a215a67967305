"""The engine on the hip backend: the monokernel goes through hip-python to a simulated machine with
warps of 64 and gfx942's memory model.
"""

import pytest

import kccl
from kccl.base import abi
from kccl.base.abi import lib
from kccl.engine import Engine
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.sample import SamplingParams
from kccl.gpu import library

SMALL = {"hidden": 64, "head_dim": 16, "vocab_size": 128, "context": 64, "ffn": 128}
SMALL |= {"num_lanes": 2, "num_heads": 4, "num_kv_heads": 2, "num_layers": 2}
# The first 8 of them fill the cache in one chunk.
IDS = [99, 5, 17, 64, 3, 8, 21, 90, 16]
NEW = 3
CODE = 999  # hipErrorUnknown


@pytest.fixture(autouse=True)
def as_often_as_on_a_gpu(amd, monkeypatch):
    """Waiting warps note at each check what they wait for. If each poll is a check, the simulated
    machine always has something to do, and lets no other rank in.
    """
    monkeypatch.setattr(abi, "GPU_POLLS_PER_CHECK", lib.kKcclGpuPollsPerCheck)


# Layers with a window of keys.
LAYERS = {"tiny-laneformer": {"window": 3, "window_layers": 1}}
LAYERS["tiny-gpt-oss"] = {"window_layers": (0,)}


def checkpoint(model):
    return random_checkpoint(model, **SMALL, **LAYERS.get(model, {}))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ranks"),
    [("tiny-laneformer", 2), ("tiny-llama", 1), ("tiny-gpt-oss", 1)],
)
def test_tokens_are_the_references(model, ranks):
    expected = Reference(checkpoint(model)).generate(IDS, SamplingParams(max_tokens=NEW))
    wanted = [token for token, _ in expected]
    assert len(set(wanted)) > 1
    with Engine(checkpoint(model), "hip", ranks, blocks=2) as engine:
        assert engine.devices() == ["simulated MI300X"] * ranks
        assert engine.generate(IDS, max_tokens=NEW).ids == wanted


@pytest.mark.parametrize(
    "function", ["hipExtMallocWithFlags", "hipModuleLoadData", "hipModuleLaunchKernel"]
)
def test_what_fails_while_an_engine_opens_is_named(amd, monkeypatch, function):
    # Kernels are loaded anew, and windows are plain memory.
    monkeypatch.setattr(library, "_loaded", {})
    monkeypatch.setenv("KCCL_WINDOWS", "peer")
    amd(function, CODE)
    with pytest.raises(kccl.BackendError, match=rf"{function} failed: \w+ \({CODE}\)"):
        Engine(checkpoint("tiny-laneformer"), "hip", 1, blocks=2)


def test_a_launch_that_the_driver_refuses_ends_the_answer(amd):
    with Engine(checkpoint("tiny-laneformer"), "hip", 1, blocks=2) as engine:
        amd("hipModuleLaunchKernel", CODE)
        with pytest.raises(kccl.BackendError, match=rf"hipModuleLaunchKernel failed.*{CODE}"):
            engine.generate(IDS, max_tokens=NEW)
        amd("hipModuleLaunchKernel", 0)


def test_blocks_that_do_not_fit_the_device_are_refused():
    with pytest.raises(kccl.InvalidArgument, match=r"blocks is 306.*the rank has 304 multiproc"):
        Engine(checkpoint("tiny-laneformer"), "hip", 1, blocks=306)
