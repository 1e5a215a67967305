"""The monokernel without overlap, and with random delays: the same bits."""

from dataclasses import replace
from typing import Any

import pytest
from test_monokernel import CONTEXT, IDS, MERGING, NEW, TUNING, checkpoint, expected

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.model.sample import SamplingParams
from kccl.engine.model.variant import parse
from kccl.engine.monokernel.shape import Tuning

# Vectors are taken from the exchange buffer without waiting for them.
NO_WAITS = parse("exchanges").ablated


def run(
    name: str,
    *,
    overlaps: bool,
    tuning: Tuning = TUNING,
    ranks: int = 1,
    ids: list[int] = IDS,
    num: int = NEW,
    **simulation: Any,
) -> tuple[list[int], list[bytes]]:
    """`num` tokens after the ids, the same on all ranks; and each rank's keys and values."""

    def main(comm: kccl.Communicator) -> tuple[list[int], bytes]:
        executor = DeviceExecutor(
            checkpoint(name),
            comm,
            tuning=tuning,
            context=CONTEXT,
            warp_size=simulation.get("warp_size", 32),
        )
        try:
            params = SamplingParams(max_tokens=num)
            executor.prepare(params, overlaps=overlaps)
            # No rank still compiles when another one's kernel runs.
            comm.barrier()
            executor.start(ids, params, overlaps=overlaps)
            tokens = [token.id for token in executor.tokens()]
            return tokens, executor._arena.read(
                executor._task.cache, executor._kernels.usual.sizes.cache
            )
        finally:
            executor.close()

    results = kccl.run_threads(main, ranks, backend="sim", **simulation)
    tokens = results[0][0]
    assert all(each == tokens for each, _ in results)
    return tokens, [cache for _, cache in results]


@pytest.mark.long
def test_the_tokens_are_the_same_without_overlap():
    """As on AMD's GPUs. The other test here has a ring of weights."""
    tuning = replace(MERGING, weights_in_registers=True)
    tokens, _ = run("tiny-llama", overlaps=False, tuning=tuning, warp_size=64, model="gfx942")
    assert tokens == expected("tiny-llama")[1]


@pytest.mark.long
def test_without_overlap_all_is_there_before_it_is_read():
    """So a kernel that waits for no vector has the same bits. With overlap the simulator sees that
    it reads too early.
    """
    # The first token comes behind what the cache has.
    given: dict[str, Any] = {"ids": IDS[:3], "num": 1}
    _, right = run("tiny-laneformer", ranks=2, overlaps=True, **given)
    given["tuning"] = replace(TUNING, ablated=NO_WAITS)
    assert run("tiny-laneformer", ranks=2, overlaps=False, **given)[1] == right
    with pytest.raises(kccl.Error, match="slot reused"):
        run("tiny-llama", overlaps=True, **given)
