"""Layers of experts: random routes, what a kernel of tests/kernels/experts.cuh gets, and what it
must give.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np

KERNELS = Path(__file__).parents[1] / "kernels"
SOURCE = '#include "experts.cuh"\n'
TYPES = {"float": np.float32, "kccl::bf16": ml_dtypes.bfloat16, "kccl::f16": np.float16}
LINE, SLOT_UNIT = 128, 16


def kernel_name(element, by):
    return f"kccl::layers_of_experts<{element}, kccl::By::k{by}>"


@dataclass(frozen=True)
class Layers:
    """Some layers, made in one launch.

    Attributes:
        capacity: None for as many as the routes need.
        per_row: Scales of a row.
    """

    world_size: int
    num_experts: int
    top_k: int = 2
    columns: int = 20
    rounds: int = 5
    most_rows: int = 4
    per_row: int = 3
    element: str = "float"
    capacity: int | None = None
    seed: int = 0

    @cached_property
    def per_rank(self):
        return -(-self.num_experts // self.world_size)

    def own(self, rank):
        return range(self.num_experts)[self.per_rank * rank :][: self.per_rank]

    @cached_property
    def dtype(self):
        return np.dtype(TYPES[self.element])

    @cached_property
    def inputs(self):
        """Each rank's numbers of rows, rows, experts of rows, weights and scales."""
        rng = np.random.default_rng(self.seed)
        shape = (self.rounds, self.most_rows)
        made = []
        for _ in range(self.world_size):
            # One choice in eight is none; often two are of the same expert.
            chosen = rng.integers(0, self.num_experts, (*shape, self.top_k), np.int32)
            chosen[rng.random(chosen.shape) < 1 / 8] = -1
            made.append(
                (
                    rng.integers(0, self.most_rows + 1, self.rounds, np.uint32),
                    rng.standard_normal((*shape, self.columns)).astype(self.dtype),
                    chosen,
                    rng.standard_normal((*shape, self.top_k)).astype(np.float32),
                    rng.standard_normal((*shape, self.per_row)).astype(np.float32),
                )
            )
        return made

    def sent(self, layer, expert, source):
        """The rows that a rank sends to an expert: (row, choice), in the order of their slots."""
        num_rows, _, chosen, *_ = self.inputs[source]
        return [
            (int(row), int(choice))
            for row, choice in zip(*np.nonzero(chosen[layer] == expert), strict=True)
            if row < num_rows[layer]
        ]

    @cached_property
    def slots(self):
        """Rows that one rank may send to one expert."""
        every = [
            len(self.sent(layer, expert, source))
            for layer in range(self.rounds)
            for expert in range(self.num_experts)
            for source in range(self.world_size)
        ]
        return max(every) if self.capacity is None else self.capacity

    @cached_property
    def window_bytes(self):
        """What experts_bytes() of experts.cuh says."""

        def up(value, unit):
            return -(-value // unit) * unit

        slot = up(self.columns * self.dtype.itemsize, SLOT_UNIT) + up(4 * self.per_row, SLOT_UNIT)
        area = up(up(4 * self.per_rank, LINE) + self.per_rank * self.slots * slot, LINE)
        return LINE + 2 * self.world_size * area

    def part(self, rank):
        """The arrays of a rank, by the names of the kernel's parameters."""
        own, each = len(self.own(rank)), self.world_size * self.slots
        num_rows, x, chosen, weights, scales = self.inputs[rank]
        return {
            **{"num_rows": num_rows, "x": x, "chosen": chosen, "weights": weights},
            "scales": scales,
            "rows": np.zeros((self.rounds, own, each, self.columns), self.dtype),
            "row_scales": np.zeros((self.rounds, own, each, self.per_row), np.float32),
            "counts": np.zeros((self.rounds, own, self.world_size), np.uint32),
            "slots": np.full_like(chosen, -1),
            "results": np.zeros((own, each, self.columns), self.dtype),
            "out": np.zeros_like(x),
        }

    @property
    def numbers(self):
        """The kernel's parameters between the window and the arrays."""
        shape = (self.num_experts, self.slots, self.columns)
        return (*shape, self.rounds, self.most_rows, self.top_k, self.per_row)

    def run(self, comm, kernel, *, window_bytes=None, **shape):
        """Launches the kernel on this rank, and compares what it gives."""
        part = self.part(comm.rank)
        window = comm.window(self.window_bytes if window_bytes is None else window_bytes)
        device_comm = comm.device_comm(channels=shape.get("grid", 1), max_bytes=64)
        kernel(comm, device_comm, window, *self.numbers, *part.values(), **shape)
        self.check(comm.rank, part)

    def check(self, rank, part):
        rows, row_scales, counts = part["rows"], part["row_scales"], part["counts"]
        for layer in range(self.rounds):
            for index, expert in enumerate(self.own(rank)):
                sent = [self.sent(layer, expert, source) for source in range(self.world_size)]
                assert counts[layer, index].tolist() == [len(each) for each in sent]
                at = 0
                for source, each in enumerate(sent):
                    _, x, _, _, scales = self.inputs[source]
                    for row, _ in each:
                        np.testing.assert_array_equal(rows[layer, index, at], x[layer, row])
                        np.testing.assert_array_equal(
                            row_scales[layer, index, at], scales[layer, row]
                        )
                        at += 1
                assert not rows[layer, index, at:].any()
        np.testing.assert_array_equal(part["out"].view(np.uint8), self.want(rank).view(np.uint8))

    def want(self, rank):
        """The sums of a rank: the products in the experts' order, rounded once."""
        num_rows, x, chosen, weights, _ = self.inputs[rank]
        want = np.zeros_like(x)
        for layer in range(self.rounds):
            for row in range(num_rows[layer]):
                total = np.zeros(self.columns, np.float32)
                for choice in np.argsort(chosen[layer, row], kind="stable"):
                    expert = chosen[layer, row, choice]
                    if expert < 0:
                        continue
                    factor = np.float32(expert + 1)
                    result = (x[layer, row].astype(np.float32) * factor).astype(self.dtype)
                    total += weights[layer, row, choice] * result.astype(np.float32)
                want[layer, row] = total.astype(self.dtype)
        return want
