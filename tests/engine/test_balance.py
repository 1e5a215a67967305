"""How evenly the blocks of a GPU share a layer of a mixture of experts."""

import numpy as np
import pytest

import kccl
from kccl.engine.executors.opening import read_for
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.program import Program
from kccl.engine.monokernel.machine import Machine
from kccl.engine.monokernel.source import KERNELS, source_of
from kccl.engine.monokernel.tuning import tuning_for

H200 = Machine(132)
# Writes the bytes of a layer that each block reads.
TELL = """
template <class... M>
uint64_t bytes_of(uint32_t block, kccl::decode::Matrices<M...>) {
    return (... + (uint64_t{M::tiles_of(block).num} * M::kAllSteps * M::kStepBytes));
}
KCCL_KERNEL void tell(uint64_t* out) {
    if (kccl::platform::thread_in_block() != 0) return;
    for (uint32_t block = 0; block < Model::kBlocks; ++block) {
        kccl::mem::store_plain(out + block, bytes_of(block, kccl::decode::Products<Model>{}));
    }
}
"""


def program_of(model: str, weights: str | None = None) -> Program:
    checkpoint = read_for(random_checkpoint(model), "cuda", None, weights)
    return Program(checkpoint.config, checkpoint.formats)


@pytest.mark.parametrize(
    ("model", "weights", "steps"),
    [("gpt-oss-120b", None, 16), ("qwen3-30b-a3b", None, 4), ("qwen3-30b-a3b", "fp8", 8)],
)
def test_a_mixture_has_eight_warps_and_registers_for_the_steps_of_a_stage(model, weights, steps):
    """Four warps, and six, would need fewer zeros. gpt-oss's experts have a scale for two tiles."""
    tuning = tuning_for(program_of(model, weights), 1, H200)
    assert (tuning.warps, tuning.stage_steps) == (8, steps)


@pytest.mark.parametrize(
    ("model", "most"),
    [("gpt-oss-120b", 1.13), pytest.param("qwen3-30b-a3b", 1.07, marks=pytest.mark.long)],
)
def test_no_block_has_many_more_bytes_than_the_mean(model, most):
    """Before they were balanced, some blocks had 1.35 and 1.14 times as many."""
    program = program_of(model)
    source, _, _ = source_of(program, 1, 1024, tuning_for(program, 1, H200)).partition(
        "KCCL_KERNEL_OF("
    )
    for name in ("pack", "prefill", "trace_layout"):
        source = source.replace(f'#include "{name}.cuh"\n', "")
    source = source.replace('"decode.cuh"', '"shape.cuh"') + TELL

    def main(comm: kccl.Communicator) -> list[int]:
        out = np.zeros(H200.multiprocessors, np.uint64)
        module = kccl.compile(source, ["tell"], include_dirs=[KERNELS])
        module.kernel("tell")(comm, out, grid=1, block=32)
        return out.tolist()

    (found,) = kccl.run_threads(main, 1, backend="sim")
    assert sum(found) > 0
    assert max(found) <= most * np.mean(found)
