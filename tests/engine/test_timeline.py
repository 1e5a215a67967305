"""Kernels that trace or leave something out: in the simulator, and on hand-made stamps."""

import numpy as np

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.monokernel.shape import Tuning
from kccl.engine.monokernel.trace import (
    Stamps,
)
from kccl.engine.monokernel.variant import TRACING, USUAL
from kccl.engine.random_weights import random_checkpoint
from kccl.engine.sample import SamplingParams

TUNING = Tuning(blocks=4, warps=2, stages=4, stage_steps=2, in_flight=2, strands=2, splits=1)
SMALL = {"hidden": 64, "head_dim": 16, "vocab_size": 128, "context": 64, "ffn": 128}
SMALL |= {
    "num_lanes": 4,
    "num_heads": 8,
    "num_kv_heads": 4,
    "num_layers": 2,
    "window_layers": 1,
    "window": 3,
}
IDS = [5, 99, 17, 64]
ROUNDS = 4


def traced(ranks, model="tiny-laneformer", tuning=TUNING):
    """The stamps of ROUNDS rounds behind IDS, by rank, and the tokens that the usual kernel makes
    before and after.
    """

    def main(comm):
        executor = DeviceExecutor(
            random_checkpoint(model, **SMALL), comm, tuning=tuning, context=64
        )
        found = []
        out: list[Stamps] = []

        def generate():
            executor.start(IDS, SamplingParams(max_tokens=3))
            found.append([token.id for token in executor.tokens()])

        generate()
        executor.use(TRACING)
        executor.start_timeline(IDS, len(IDS) - 1, ROUNDS, out)
        executor.wait()
        executor.use(USUAL)
        generate()
        return out[0], found

    return kccl.run_threads(main, ranks, backend="sim")


def test_x():
    for stamps, found in traced(2):
        l = stamps.layout
        print(
            found,
            l.ops,
            l.stage_bytes.T,
            l.stage_ops.T,
            l.of_round,
            l.ring_stages,
            stamps.values.shape,
        )
        v = stamps.values.astype(np.int64)
        n = 5 * len(l.ops)
        ops = v[:, :n].reshape(ROUNDS, len(l.ops), 5, -1)
        st = v[:, n:-2].reshape(ROUNDS, -1, 3, v.shape[-1])
        print((ops[1] - v[1, -2].min())[:, :, 0])
        d = st[:, :, 1:] - st[:, :, :-1]
        print(
            "landed-asked min",
            d[:, :, 0].min(),
            "letgo-landed min",
            d[:, :, 1].min(),
            (st == 0).sum(axis=(0, 1, 2)),
        )
    assert 0
