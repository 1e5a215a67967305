"""FP16 weights in the monokernel: used as they are stored; what FP16 cannot hold is an error."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from long import long_after
from numpy.typing import NDArray
from test_monokernel import CONTEXT, SMALL, TOLERANCE, TUNING, answer, generate, logits_of
from test_prefill import CHUNKED

import kccl
from kccl.engine import Engine
from kccl.engine.diff import Diff
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import MODELS, RandomSource, random_checkpoint
from kccl.engine.formats.base import Stored
from kccl.engine.formats.float16 import FLOAT16
from kccl.engine.formats.float32 import FLOAT32
from kccl.engine.model.sample import SamplingParams

pytestmark = pytest.mark.takes(30)

# Messages of the first layer land in the third.
LAYERS = {"tiny-laneformer": 3, "tiny-llama": 1}
MACHINES: dict[int, dict[str, Any]] = {32: {}, 64: {"warp_size": 64, "model": "gfx942"}}
# A chunk that is full, one that is not, and the last id, which decodes.
IDS = [5, 99, 17, 64, 2, 120]
SCORED, NEW = IDS[:3], 2

Logits = NDArray[np.float32]


class Scaled(RandomSource):
    """Random weights whose feed-forward blocks get large vectors."""

    def __init__(self, factor: float, dtype: str, **stored: str) -> None:
        shape = replace(MODELS["tiny-llama"], num_layers=1, **SMALL)
        super().__init__(shape, 0, "x", dtype, stored)
        self._factor = factor

    def read(self, name: str, start: int, stop: int) -> Stored:
        stored = super().read(name, start, stop)
        if not name.endswith("ffn_norm"):
            return stored
        return Stored(FLOAT32, FLOAT32.from_values(stored.to_float32() * self._factor))


@cache
def checkpoint(name: str) -> Checkpoint:
    window = {"window": 4, "window_layers": 2} if name == "tiny-laneformer" else {}
    return random_checkpoint(name, num_layers=LAYERS[name], dtype="float16", **SMALL, **window)


def run(
    model: Checkpoint, comm: kccl.Communicator, warp_size: int = 32
) -> tuple[Logits, list[int]]:
    """The logits after SCORED, and the new tokens after IDS, behind prefill in chunks."""
    tuning = replace(CHUNKED, blocks=4)
    executor = DeviceExecutor(model, comm, tuning=tuning, context=CONTEXT, warp_size=warp_size)
    return logits_of(executor, SCORED), generate(executor, NEW)


@pytest.mark.parametrize(
    ("name", "warp_size"), long_after(0, [("tiny-laneformer", 32), ("tiny-llama", 64)])
)
def test_weights_are_used_as_they_are_stored(name, warp_size):
    model = checkpoint(name)
    assert (model.dtype, model.stored) == ("float16", ("F16",))
    reference = Reference(model)
    wanted = reference.logits(SCORED)
    tokens = [token for token, _ in reference.generate(IDS, SamplingParams(max_tokens=NEW))]
    main = partial(run, model, warp_size=warp_size)
    machine = MACHINES[warp_size]
    results = kccl.run_threads(main, 1, backend="sim", **machine)
    results += kccl.run_threads(main, 2, backend="sim", seed=1, **machine)
    first = results[0][0]
    for logits, found in results:
        np.testing.assert_array_equal(logits.view(np.uint32), first.view(np.uint32))
        assert found == tokens
    np.testing.assert_allclose(first, wanted, atol=TOLERANCE)
    # With weights in BF16 it would be another model.
    rounded = Reference(model.as_dtype("bfloat16")).logits(SCORED)
    assert np.abs(first - rounded).max() > 2 * TOLERANCE


@pytest.mark.long
def test_a_vector_beyond_float16_is_an_error():
    """A value of the residual, times the norm, is about 1e5 here. One product in FP16 is enough."""

    def main(comm: kccl.Communicator) -> None:
        one = {"w1": "float16", "w3": "float16"}
        for dtype, stored in (("bfloat16", {}), ("float16", {}), ("bfloat16", one)):
            model = Checkpoint(Scaled(1e5, dtype, **stored)).as_stored(is_alike=True)
            assert model.dtype == dtype
            executor = DeviceExecutor(model, comm, tuning=TUNING, context=CONTEXT)
            if dtype == "bfloat16" and not stored:
                wanted = Reference(model).logits(IDS[:1])
                np.testing.assert_allclose(logits_of(executor, IDS[:1]), wanted, rtol=1e-2, atol=1)
                continue
            with pytest.raises(kccl.Error, match="65504, the largest of float16: dtype 'bfloat16'"):
                logits_of(executor, IDS[:1])
            with pytest.raises(kccl.Error, match="beyond 65504"):
                generate(executor, 1)
            executor.end()

    kccl.run_threads(main, 1, backend="sim")


class OneIsLarge(RandomSource):
    """Random weights with which the vectors of token 5 alone are beyond FP16. A position sees one
    before it, in each of two layers.
    """

    def __init__(self) -> None:
        window = {"window": 2, "window_layers": 2}
        shape = replace(MODELS["tiny-laneformer"], num_layers=2, **SMALL, **window)
        super().__init__(shape, 0, "x", "float16")

    def read(self, name: str, start: int, stop: int) -> Stored:
        values = super().read(name, start, stop).to_float32()
        if name == "embedding" and start <= 5 < stop:
            values[5 - start] *= 1e4
        values = values * 4 if name == "layers.0.ffn_norm" else values
        return Stored(FLOAT16, FLOAT16.from_values(values))


@pytest.mark.long
def test_a_vector_beyond_float16_within_a_chunk_is_an_error():
    """Also where the tokens behind it have finite logits; the next request is not touched."""
    model = Checkpoint(OneIsLarge())
    # The second new token could be 5.
    params = SamplingParams(max_tokens=1)
    without = [9, *IDS[1:]]

    def main(comm: kccl.Communicator) -> None:
        executor = DeviceExecutor(model, comm, tuning=replace(CHUNKED, blocks=4), context=CONTEXT)
        wanted = [token.id for token in answer(executor, without, params)]
        with pytest.raises(kccl.Error, match="beyond 65504"):
            answer(executor, IDS, params)
        executor.end()
        assert [token.id for token in answer(executor, without, params)] == wanted

    kccl.run_threads(main, 1, backend="sim")


@pytest.mark.long
def test_an_engine_has_the_dtype_that_its_backend_has():
    """The host rounds, and says so; a tensor of its own dtype is not rounded."""
    model = checkpoint("tiny-llama")
    with Engine(model, blocks=1) as engine:
        assert (engine.dtype, engine.stored) == ("bfloat16", ("F16",))
        wanted = Reference(model.as_dtype("bfloat16")).logits(IDS)
        np.testing.assert_allclose(engine.logits(IDS), wanted, atol=1e-4)
    with pytest.raises(kccl.InvalidArgument, match="dtype is 'float16', must be 'bfloat16' on"):
        Engine(model, dtype="float16")
    with pytest.raises(kccl.InvalidArgument, match="'bfloat16' or 'float16' on backend 'sim'"):
        Engine(model, "sim", dtype="float32")
    with Engine(model, "sim", context=16) as engine:
        assert engine.dtype == "float16"
        differences = list(Diff(model, engine, IDS[:2]).all())
    # Before attention only the products' vectors are rounded: to 22 bits, as the weights have 11.
    qkv = next(each for each in differences if each.op.kind == "qkv")
    assert 0 < qkv.relative < 2e-6
