"""Attention of the monokernel over several tiles, KV strands and KV splits, simulated."""

from dataclasses import replace

import numpy as np
import pytest
from test_monokernel import CONTEXT, SMALL, TOLERANCE, TUNING, logits_of

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint

pytestmark = [pytest.mark.long, pytest.mark.takes(20)]

# Three tiles of 16 positions, the last one not full: with two KV strands, one has two of them.
IDS = np.random.default_rng(1).integers(SMALL["vocab_size"], size=36).tolist()
MODEL = random_checkpoint("tiny-llama", num_layers=1, **SMALL)
CHANGES = [
    {"kv_strands": 2},
    {"kv_strands": 8, "kv_splits": 4, "merges_first": True},
    # A block has all rows, and a thread of it several.
    {"kv_strands": 8, "kv_splits": 2, "merges_first": True, "blocks": 1, "warps": 2},
]


@pytest.fixture(scope="module")
def found():
    def logits(change):
        def main(comm):
            tuning = replace(TUNING, **change)
            return logits_of(DeviceExecutor(MODEL, comm, tuning=tuning, context=CONTEXT), IDS)

        return kccl.run_threads(main, 1, backend="sim")[0]

    return [logits(change) for change in CHANGES]


def test_logits_are_the_references(found):
    wanted = Reference(MODEL).logits(IDS)
    for logits in found:
        np.testing.assert_allclose(logits, wanted, atol=TOLERANCE)


def test_splits_and_who_merges_them_change_no_bit(found):
    _, one, *others = found
    for other in others:
        np.testing.assert_array_equal(other.view(np.uint32), one.view(np.uint32))
