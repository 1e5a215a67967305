"""Defines the forms of collectives inside kernels. A form is a kernel that has its own row."""

from __future__ import annotations

from dataclasses import dataclass

NOTES = ("kMean", "kEach", "kSkewed")
DELAYS_ALONE = "in_kernel::delays_alone"
OF_SUMS = "grid_exchange"  # The algorithm of all_reduce by publish and collect_reduced.
ORDERS = {"relaxed": "kccl::mem::Order::kRelaxed", "acq_rel": "kccl::mem::Order::kAcqRel"}
TYPES = {"float32": "float", "float64": "double", "bfloat16": "kccl::bf16"}


@dataclass(frozen=True)
class Form:
    """One way in which kernels make a collective's calls. It has a row of its own.

    Attributes:
        algorithm: The algorithm that the row names.
        kernel: Name expression of the kernel, in which {notes}, {type} and {world_size} are
            replaced.
        complete: The part of the result that a block may use after a call: its own "slice", or the
            whole "message".
        order: As in Collective.
        library: The library that the row names.
        is_within: Whether the calls are between the blocks of one GPU, for any number of ranks.
    """

    algorithm: str
    kernel: str
    complete: str
    order: str = "relaxed"
    library: str = "kccl"
    is_within: bool = False

    def names(self, dtype: str | None, world_size: int) -> list[str]:
        """Returns the name expressions of the kernels, in the order of NOTES."""
        words = {"type": TYPES.get(dtype or "", ""), "world_size": world_size}
        return [self.kernel.format(notes=f"in_kernel::Notes::{notes}", **words) for notes in NOTES]


def of_data(algorithm: str, name: str, complete: str) -> Form:
    """Returns a form whose kernel is chain() of chains.cuh. It makes the calls by the class `name`,
    which has the element type and the world size as template arguments.
    """
    kernel = f"in_kernel::chain<in_kernel::{name}<{{type}}, {{world_size}}>, {{notes}}>"
    return Form(algorithm, kernel, complete)


def of_barriers(algorithm: str, name: str, order: str, *, is_within: bool = False) -> Form:
    """Returns a form whose kernel is barriers() of chains.cuh. It makes the calls by the class
    `name`, with its template arguments.
    """
    kernel = f"in_kernel::barriers<in_kernel::{name}, {{notes}}>"
    return Form(algorithm, kernel, "message", order, is_within=is_within)
