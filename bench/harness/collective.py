"""Defines a benchmarked collective: a small table of functions, as in nccl-tests.

Each file of `bench/collectives` has one table, named `COLLECTIVE`. This file does not import kccl:
the communicator and the MPI module are passed as arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from .chain import Chain
from .forms import Form
from .problem import Buffers, Call, Gather, Problem, TorchCalls

OPS = ("sum", "prod", "min", "max", "avg", "band", "bor", "bxor")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class OnGpus:
    """What `make gpu` measures of a collective.

    Attributes:
        order: Benches with lower numbers run first.
        outside: The world sizes at which its calls from the host are measured: all, or only the
            largest.
        inside: As `outside`, for its calls inside kernels. On one GPU only collectives that have a
            form within a GPU are measured.
        sizes: Arguments of `kccl bench` that choose the sizes of calls from the host.
        sizes_inside: Arguments that choose the sizes of calls inside kernels.
        sizes_of_largest: What replaces `sizes` at the largest world size; None: `sizes` holds.
    """

    order: int = 4
    outside: Literal["all", "largest"] = "largest"
    inside: Literal["all", "largest"] = "largest"
    sizes: tuple[str, ...] = ("-b", "8K", "-e", "64K", "-f", "8")
    sizes_inside: tuple[str, ...] = ("-b", "16", "-f", "8")
    sizes_of_largest: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Collective:
    """The functions and properties in which collectives differ.

    Attributes:
        name: as in `comm.<name>`.
        order: memory order that the call promises for *other* memory: "relaxed" (none) or
            "acq_rel".
        has_data: False if a call has neither a size nor a dtype, as of a barrier.
        has_op: takes a reduction operator.
        has_root: takes a root.
        has_out: has an out-of-place form.
        busbw_factor: world size -> busbw / algbw (nccl-tests' definition), None where there is no
            bandwidth.
        check: (problem, buffers, call, rank, gather, seed) -> number of wrong elements that this
            rank found. Collective. Fills the buffers with inputs made from `seed`, makes the call,
            compares exactly.
        prepare: (comm, buffers, problem, **plan keywords) -> a prepared kccl operation.
        direct: (comm, buffers, problem) -> the unprepared kccl call.
        waits_for_all: no rank leaves a call before all have arrived. Only then can a skewed run
            measure the time since the last arrival.
        mpi: (MPI module, MPI communicator, buffers, problem) -> the mpi4py call.
        nccl: (torch.distributed, buffers of tensors, problem) -> the call, or None.
        is_apart_in_nccl: NCCL's call writes to another array than it reads. So its rows are those
            of the form out of place; otherwise they are those of the form in place.
        symm_mem: (torch.ops.symm_mem, x, x's handle, an ordinary tensor like x, the group's name,
            problem) -> PyTorch's calls on symmetric memory: algorithm -> the call and the tensor
            that has its result. x is a tensor in symmetric memory. None: PyTorch has no such call.
        nvshmem: (Library of peers/nvshmem.py, address of the data in NVSHMEM's symmetric heap,
            problem, stream handle) -> NVSHMEM's call in place, or None.
        flashinfer: (flashinfer.comm, FlashInfer's workspace, input, output) -> FlashInfer's calls
            by algorithm, or None. Input and output are tensors of shape [tokens, hidden].
        mpi_algorithm: MPICH control variable, and the value that is measured in addition to MPICH's
            default; or None.
        mpi_default: the name in the column "algorithm" for rows of `mpi`.
        mpi_others: further MPI calls that do the same: name in the column "algorithm" -> a function
            like `mpi`.
        is_composed: the measured call consists of several calls of KCCL, one after another. It is
            made from Python only, between the ranks of a pair, and has one algorithm.
        is_on_cpus: the measured call reads a window from Python, which no GPU's window allows.
        is_apart: the measured call writes to another array than it reads, and has no other form.
        is_planned: the plan chooses among algorithms of this collective. False if it uses another
            collective's plan; bench/tune skips those.
        has_chunks: the message consists of one chunk of equal length for each rank.
        dtype: the only element type that the call takes, or None.
        end: default of the last size in bytes; None for the default of `kccl bench`.
        forms: its forms inside kernels, in the order of the rows.
        chain: inputs and expected results of its chains of calls inside kernels. None for barriers
            and exchanges, whose launches check themselves, and for collectives without forms.
        is_apart_in_kernels: inside kernels it writes to another array than it reads.
        on_gpus: what `make gpu` measures.
    """

    name: str
    order: str
    has_data: bool
    has_op: bool
    has_root: bool
    has_out: bool
    waits_for_all: bool
    busbw_factor: Callable[[int], float | None]
    check: Callable[[Problem, Buffers, Call, int, Gather, int], int]
    prepare: Callable[..., Any]
    direct: Callable[[Any, Buffers, Problem], Call]
    mpi: Callable[[Any, Any, Buffers, Problem], Call]
    mpi_algorithm: tuple[str, str] | None = None
    mpi_default: str = "default"
    mpi_others: Mapping[str, Callable[[Any, Any, Buffers, Problem], Call]] = field(
        default_factory=dict
    )
    is_composed: bool = False
    is_on_cpus: bool = False
    is_apart: bool = False
    nccl: Callable[[Any, Buffers, Problem], Call] | None = None
    is_apart_in_nccl: bool = False
    symm_mem: Callable[[Any, Any, Any, Any, str, Problem], TorchCalls] | None = None
    nvshmem: Callable[[Any, int, Problem, int], Call] | None = None
    flashinfer: Callable[[Any, Any, Any, Any], dict[str, Call]] | None = None
    is_planned: bool = True
    has_chunks: bool = False
    dtype: str | None = None
    end: int | None = None
    forms: tuple[Form, ...] = ()
    chain: Chain | None = None
    is_apart_in_kernels: bool = False
    on_gpus: OnGpus = OnGpus()

    @property
    def only_in_kernels(self) -> bool:
        """True if there is no call outside of kernels."""
        return self.prepare is call_in_kernels

    def check_place(self, backend: str, *, in_kernel: bool) -> None:
        """Raises ValueError if the collective cannot be measured on this backend, or in kernels."""
        if self.is_on_cpus and backend not in ("host", "sim"):
            raise ValueError(f"{self.name} has rows on the host and the simulator only")
        if self.is_composed and in_kernel:
            raise ValueError(f"{self.name} has no rows inside kernels")

    def problems(
        self,
        sizes: Sequence[int],
        *,
        dtype: str,
        np_dtype: np.dtype[Any],
        op: str,
        root: int,
        in_place: bool,
        world_size: int,
    ) -> list[Problem]:
        """Returns one problem per size in bytes, without duplicates.

        A size is rounded down to whole elements, and with `has_chunks` to a multiple of the world
        size. It has at least one element, or one for each rank.
        """
        if not self.has_data:
            return [Problem(self.name, 0, 0, None, None, None, None, None, world_size)]
        unit = world_size if self.has_chunks else 1
        counts = dict.fromkeys(
            unit * max(1, nbytes // np_dtype.itemsize // unit) for nbytes in sizes
        )
        return [
            Problem(
                self.name,
                count * np_dtype.itemsize,
                count,
                dtype,
                np_dtype,
                op if self.has_op else None,
                root if self.has_root else None,
                in_place and not self.is_apart,
                world_size,
                unit,
            )
            for count in counts
        ]


def checks_itself(
    problem: Problem, buffers: Buffers, call: Call, rank: int, gather: Gather, seed: int
) -> int:
    """Makes the call and returns 0. It is the `check` of collectives whose contenders check every
    launch and count wrong elements themselves.
    """
    call()
    return 0


def call_in_kernels(*_: Any, **__: Any) -> Any:
    """Takes the place of functions of a collective that is only called inside kernels.

    Raises:
        NotImplementedError: Always.
    """
    raise NotImplementedError("this collective is called inside kernels only")


def parse_size(text: str) -> int:
    """Returns the bytes of a size in nccl-tests' notation: "8", "64K", "1M", "2G" (powers of 1024).

    Raises:
        ValueError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+)([kmg]?)b?", text.strip().lower())
    if match is None:
        raise ValueError(
            f"{text!r} is not a size: expected a number with an optional K, M or G, as in 64K"
        )
    return int(match[1]) * _UNITS[match[2]]


def sweep(begin: int, end: int, factor: int) -> list[int]:
    """Returns sizes in bytes from `begin` to at most `end`, each `factor` times the one before.

    Raises:
        ValueError: the range is empty or would not end.
    """
    if begin < 1 or end < begin:
        raise ValueError(f"sizes from {begin} to {end} bytes: the range is empty")
    if factor < 2:
        raise ValueError(f"factor {factor}: must be at least 2, or sizes do not grow")
    sizes = []
    while begin <= end:
        sizes.append(begin)
        begin *= factor
    return sizes
