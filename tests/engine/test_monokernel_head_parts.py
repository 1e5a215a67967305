"""A head with a part of the vocabulary for each lane, in the monokernel on the simulator."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_monokernel import CONTEXT, IDS, SMALL, TOLERANCE, TUNING, answer, logits_of

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.sample import SamplingParams

pytestmark = [pytest.mark.long, pytest.mark.takes(30)]

MODEL = random_checkpoint(
    "tiny-laneformer", num_layers=3, window_layers=0, window=0, lm_head="vocab_parallel", **SMALL
)
# Marks of ids, and what each block finds among its rows.
PARAMS = SamplingParams(max_tokens=3, temperature=1.0, seed=3, repetition_penalty=1.3)

Array = NDArray[np.float32]


def final_of(executor: DeviceExecutor, comm: kccl.Communicator) -> Array:
    """What of the op "final" this rank has, at the first id; NaN elsewhere."""
    op = executor.program.by_name["final"]
    out = np.full((op.shape[0], 1, op.shape[1]), np.nan, np.float32)
    executor.start_trace(IDS[:1], {op.index: out}, writes_shared=comm.rank == 0)
    executor.wait()
    return out


def run(ranks: int, *, samples: bool = False) -> list[Any]:
    """Gives, for each rank, the logits after IDS, the op "final", and the tokens if samples."""

    def main(comm: kccl.Communicator) -> tuple[Array, Array, list[int]]:
        executor = DeviceExecutor(MODEL, comm, tuning=TUNING, context=CONTEXT)
        tokens = answer(executor, IDS, PARAMS) if samples else []
        logits = logits_of(executor, IDS)
        return logits, final_of(executor, comm), [token.id for token in tokens]

    return kccl.run_threads(main, ranks, backend="sim", seed=ranks)


def test_each_lane_makes_its_part_of_the_logits_on_any_number_of_ranks():
    reference = Reference(MODEL)
    wanted, final = reference.logits(IDS), reference.trace(IDS[:1])["final"]
    assert final.shape == (4, 1, SMALL["hidden"])
    tokens = [token for token, _ in reference.generate(IDS, PARAMS)]
    ((one, own_final, found),) = run(1, samples=True)
    assert found == tokens
    np.testing.assert_allclose(one, wanted, atol=TOLERANCE)
    np.testing.assert_allclose(own_final, final, atol=TOLERANCE)
    for ranks in (2, 4):
        for rank, (logits, part, _) in enumerate(run(ranks)):
            np.testing.assert_array_equal(logits.view(np.uint32), one.view(np.uint32))
            lanes = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
            np.testing.assert_array_equal(part[lanes], own_final[lanes])
            assert np.isnan(np.delete(part, np.arange(4)[lanes], axis=0)).all()
