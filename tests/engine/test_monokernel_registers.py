"""The monokernel in the simulator, with weights that warps load ahead into registers, as on AMD's
GPUs.
"""

from dataclasses import replace

import numpy as np
import pytest
from long import hunted, long_after
from test_monokernel import (
    CONTEXT,
    MERGING,
    NEW,
    TOLERANCE,
    TUNING,
    checkpoint,
    expected,
    generate,
    kernels,
    on_one_rank,
    run,
)

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.model.program import Program
from kccl.engine.model.variant import TRACING, USUAL, parse
from kccl.engine.monokernel.other_tuning import with_variant

__all__ = ["kernels"]

REGISTERS = replace(TUNING, weights_in_registers=True)
# Stages have whole row tiles, and a product's last one may have fewer than the others.
SHORT = {"blocks": 6, "stage_steps": 4}


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "tuning"),
    long_after(
        1,
        [
            ("tiny-laneformer", REGISTERS),
            # Each block has rows of one product or two.
            ("tiny-llama", replace(MERGING, weights_in_registers=True, blocks=20)),
        ],
    ),
    ids=["laneformer", "few rows"],
)
def test_the_bits_are_those_of_a_ring(model, tuning):
    """test_monokernel.py has two ranks, with warps of 64."""
    wanted, tokens = on_one_rank(model, MERGING if model == "tiny-llama" else TUNING)
    logits, found = run(model, tuning=tuning)
    np.testing.assert_array_equal(logits.view(np.uint32), wanted.view(np.uint32))
    assert found == tokens == [expected(model)[1]]


@pytest.mark.long
def test_weights_are_read_alone_or_not_at_all():
    def main(comm: kccl.Communicator) -> list[list[int]]:
        executor = DeviceExecutor(
            checkpoint("tiny-laneformer"), comm, tuning=REGISTERS, context=CONTEXT
        )
        executor.start_streaming(2)
        executor.wait()
        found = [generate(executor, NEW)]
        for variant in (parse("weights"), USUAL):
            executor.use(variant)
            found.append(generate(executor, NEW))
        return found

    (found,) = kccl.run_threads(main, 1, backend="sim")
    _, tokens = expected("tiny-laneformer")
    assert found[::2] == [tokens, tokens]
    # The first stage is multiplied again and again.
    assert found[1] != tokens


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (TRACING, "a timeline is of stages in a ring"),
        (parse("exchanges+pin:out"), "pin:P is of stages in a ring"),
        (parse("in-flight=2"), "in-flight=N is of stages in a ring"),
    ],
    ids=["timeline", "pin", "in-flight"],
)
def test_what_asks_for_a_ring_is_refused(variant, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        with_variant(Program(checkpoint("tiny-llama").config), REGISTERS, variant)


# Text of weights_registers.cuh that is there once, and what takes its place.
BUGS = {
    "a short stage counts as a whole one": (
        "next_ += least_of(num, whole);",
        "next_ += whole;",
    ),
    "the head's weights come in every token step": ("if (next_ == end_)", "if (next_ == num_)"),
    "a stage is not loaded": (
        "(S::kAblated & kKcclDecodeNoWeights) == 0) load();",
        "false) load();",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_planted_bugs_change_logits_or_tokens(bug, kernels):
    right, wrong = BUGS[bug]
    path = kernels / "weights_registers.cuh"
    text = path.read_text()
    assert text.count(right) == 1
    path.write_text(text.replace(right, wrong))
    wanted, tokens = expected("tiny-llama")
    found, new = run("tiny-llama", tuning=replace(MERGING, weights_in_registers=True, **SHORT))
    assert not np.allclose(found, wanted, atol=TOLERANCE) or new != [tokens]
