"""Programs of collectives for the interpreter, and their right results in rank order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gcn_machine import Launch, Program, Report
from gcn_world import Sizes, World

Array = "np.ndarray[Any, Any]"


def _sum(inputs: "Sequence[Array]") -> "Array":
    """In rank order, rounded once at the end, as the library adds up floats of 32 bits."""
    total = inputs[0].copy()
    for each in inputs[1:]:
        total = total + each
    return total


def _scattered(inputs: "Sequence[Array]") -> "list[Array]":
    return list(np.split(_sum(inputs), len(inputs)))


def _reduced(inputs: "Sequence[Array]") -> "list[Array]":
    return [_sum(inputs)] * len(inputs)


def _gathered(inputs: "Sequence[Array]") -> "list[Array]":
    return [np.concatenate(inputs)] * len(inputs)


# A kernel's results by rank, from the inputs of all ranks.
RESULTS: "dict[str, Callable[[Sequence[Array]], list[Array]]]" = {
    "all_reduce_one_shot_ll16": _reduced,
    "all_reduce_one_shot_sentinel": _reduced,
    "all_reduce_two_shot_sentinel": _reduced,
    "all_reduce_two_shot_push_simple": _reduced,
    "reduce_scatter_direct_ll16": _scattered,
    "reduce_scatter_push_simple": _scattered,
    "all_gather_direct_ll16": _gathered,
    "all_gather_push_simple": _gathered,
}


@dataclass(frozen=True)
class Outcome:
    """A run of a program.

    Attributes:
        report: What the machine says.
        wrong: What is wrong, in the order in which it is looked for; None if nothing is.
    """

    report: Report
    wrong: str | None


def collective(
    kernel: str,
    world_size: int,
    *,
    count: int = 1000,
    grid: int = 2,
    block: int = 128,
    calls: int = 3,
    seed: int = 0,
    program: Program | None = None,
    **more: Any,
) -> Outcome:
    """Makes some calls, one a launch, and compares each result with that in rank order.

    Args:
        kernel: Its name; a key of RESULTS.
        world_size: Number of ranks.
        count: Elements of an input, float32.
        grid, block: Blocks, and threads of a block.
        calls: Number of calls, each with inputs of its own.
        seed: As gcn_machine.run()'s.
        program: Runs instead of what the compiler wrote.
        more: For gcn_machine.run().
    """
    world = World(world_size, Sizes())
    generator = np.random.default_rng(count + seed)
    launches: list[Launch] = []
    expected = []
    for _ in range(calls):
        values = [generator.standard_normal(count, np.float32) for _ in range(world_size)]
        results = RESULTS[kernel](values)
        inputs = [world.array(rank, value) for rank, value in enumerate(values)]
        outputs = [
            world.array(rank, np.full_like(want, np.nan)) for rank, want in enumerate(results)
        ]
        expected += list(zip(outputs, results, strict=True))
        for rank in range(world_size):
            length = results[rank].size if kernel.startswith("reduce_scatter") else None
            launches.append(
                world.call(
                    rank,
                    kernel,
                    input=inputs[rank],
                    output=outputs[rank],
                    count=length,
                    grid=grid,
                    block=block,
                    program=program,
                )
            )
    report = world.run(launches, seed=seed, **more)
    wrong = report.finding
    for number, (output, want) in enumerate(expected):
        if wrong is None and output.tobytes() != want.tobytes():
            wrong = f"call {number // world_size} of rank {number % world_size} has a wrong result"
    if wrong is None and any(world.status(rank) for rank in range(world_size)):
        wrong = "a wait failed"
    return Outcome(report, wrong)
