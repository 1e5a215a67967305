"""Lanes that do not divide over the ranks, in the monokernel on the simulator."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from test_monokernel import CONTEXT, SMALL, TOLERANCE, TUNING, answer
from test_prefill import CHUNKED

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.executor import BEGINNING
from kccl.engine.model.sample import SamplingParams
from kccl.engine.model.timeline import Stamps, timelines
from kccl.engine.model.variant import TRACING

pytestmark = [pytest.mark.long, pytest.mark.takes(30)]

# A chunk that is full, one that is not, and the last id, which decodes.
IDS = [5, 99, 17, 64, 2, 120]
# So many blocks have different numbers of rows.
UNEVEN = replace(CHUNKED, blocks=6)
NEW = 2
# The ranks have 1 and 2 lanes.
FIELDS = {"num_layers": 2, "num_lanes": 3, "num_heads": 12, "num_kv_heads": 3, "ffn": 192}


def run(model: Checkpoint, comm: kccl.Communicator) -> tuple[NDArray[np.float32], list[int]]:
    """The logits after IDS, and the new tokens, behind prefill in chunks."""
    executor = DeviceExecutor(model, comm, tuning=UNEVEN, context=CONTEXT)
    logits = np.empty((len(IDS), model.config.vocab_size), np.float32)
    executor.start_scoring(IDS, logits, writes_shared=True)
    executor.wait()
    tokens = answer(executor, IDS, SamplingParams(max_tokens=NEW))
    return logits, [token.id for token in tokens]


def test_ranks_with_different_numbers_of_lanes_change_no_bit():
    model = random_checkpoint("tiny-llama", **SMALL | FIELDS)
    ((one, tokens),) = kccl.run_threads(partial(run, model), 1, backend="sim")
    reference = Reference(model)
    np.testing.assert_allclose(one, reference.logits(IDS), atol=TOLERANCE)
    wanted = reference.generate(IDS, SamplingParams(max_tokens=NEW))
    assert tokens == [token for token, _ in wanted]
    for seed in range(3):
        for logits, found in kccl.run_threads(partial(run, model), 2, backend="sim", seed=seed):
            np.testing.assert_array_equal(logits.view(np.uint32), one.view(np.uint32))
            assert found == tokens


def test_ranks_with_different_numbers_of_stages_are_traced():
    def main(comm: kccl.Communicator) -> tuple[Stamps, int]:
        model = random_checkpoint("tiny-llama", **SMALL | FIELDS)
        executor = DeviceExecutor(model, comm, tuning=TUNING, context=CONTEXT)
        executor.use(TRACING)
        # No rank still compiles when another one's kernel runs.
        comm.barrier()
        out: list[Stamps] = []
        executor.start_timeline(IDS, BEGINNING, 3, out)
        executor.wait()
        return out[0], executor.nbytes

    found = kccl.run_threads(main, 2, backend="sim")
    one, two = (stamps for stamps, _ in found)
    assert one.layout.of_token_step < two.layout.of_token_step
    assert all(stamps.layout.stage_bytes.sum() == nbytes for stamps, nbytes in found)
    assert [each.num_token_steps for each in timelines([one, two])] == [1, 1]
