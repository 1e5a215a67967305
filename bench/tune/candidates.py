"""Shared code of tuning on all backends: which algorithms cannot run, and why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

import kccl

from ..harness.collective import Collective
from ..harness.measure import Contender
from ..harness.problem import Buffers, Comm, Problem
from .choice import Candidate

Candidates = list[tuple[Candidate, Contender]]


def floats_only(
    comm: Comm, collective: Collective, make_buffers: Callable[[Problem], Buffers]
) -> Set[str]:
    """Returns the algorithms of the collective that do not take integers. Collective.

    It prepares calls with integers and with floats, and compares which algorithms refuse.
    """
    kind = np.dtype(np.int32)
    (problem,) = collective.problems(
        [kind.itemsize * comm.world_size],
        dtype="int32",
        np_dtype=kind,
        op="sum",
        root=0,
        in_place=True,
        world_size=comm.world_size,
    )

    def able(problem: Problem) -> set[str]:
        mine, found = make_buffers(problem), set()
        for name in comm.algorithms(collective.name):
            try:
                collective.prepare(comm, mine, problem, algorithm=name)
            except kccl.InvalidArgument:
                continue
            found.add(name)
        return found

    is_float = replace(problem, dtype="float32", np_dtype=np.dtype(np.float32))
    return able(is_float) - able(problem)


class Refusals:
    """Prints, once for each reason, why an algorithm does not run."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._said: set[str] = set()

    @contextmanager
    def of(self, name: str, problem: Problem) -> Iterator[None]:
        """Catches kccl.InvalidArgument inside the context, and prints it as the reason why the
        algorithm `name` does not run.
        """
        try:
            yield
        except kccl.InvalidArgument as error:
            text = f"# {name} does not run at {problem.nbytes} bytes: {error}"
            if self._rank == 0 and str(error) not in self._said:
                print(text, file=sys.stderr)
            self._said.add(str(error))
