"""The memory that a call writes. Under KCCL_CHECK=1 the ranks compare it before each call, because
ranks that write the same memory get wrong results without an error.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ..base import mapping
from ..base.arrays import ArrayView
from ..base.errors import BackendError, InvalidArgument
from ..ranks import job


class _Place(NamedTuple):
    """Where one array lies: in bytes [begin, end) of `memory`, which is one for all ranks that can
    reach it.
    """

    memory: str
    begin: int
    end: int
    process: str
    threads_may_share: bool
    name: str


@dataclass(frozen=True)
class Written:
    """The arrays of one rank that no other rank may give to the same call.

    Attributes:
        arrays: The name of the argument, and the view, of each array.
        threads_may_share: True if ranks that are threads of one process may give the same array.
    """

    arrays: tuple[tuple[str, ArrayView], ...] = ()
    threads_may_share: bool = False

    def places(self) -> bytes:
        """Returns where the arrays lie, in a form that check_apart() takes on every rank.

        Raises:
            BackendError: /proc cannot be read.
        """
        found = [self._place_of(*each) for each in self.arrays if each[1].nbytes]
        return json.dumps(found).encode()

    def _place_of(self, name: str, view: ArrayView) -> _Place:
        process = f"{job.machine_id()} {os.getpid()}"
        try:
            file, begin = mapping.place_of(view.address)
        except OSError as error:
            raise BackendError(
                f"/proc/self/maps cannot be read ({error.strerror}): under KCCL_CHECK=1 the ranks "
                "compare by it which memory they share"
            ) from error
        # Containers of one machine have process ids of their own, and may share a file all the
        # same.
        memory = f"{job.boot_id()} {file}" if file else process
        return _Place(memory, begin, begin + view.nbytes, process, self.threads_may_share, name)


NOTHING = Written()


def check_apart(places: Sequence[bytes]) -> None:
    """Checks that no array of a rank overlaps another one.

    Args:
        places: What Written.places() has returned on each rank, in rank order.

    Raises:
        InvalidArgument: Two arrays overlap. Every rank raises the same text.
    """
    found = [(_Place(*each), rank) for rank, text in enumerate(places) for each in json.loads(text)]
    # In this order, an array that overlaps any other one overlaps one of its neighbours.
    found.sort(key=lambda each: (each[0].memory, each[0].begin, each[1]))
    for (one, rank), (two, other) in pairwise(found):
        if one.memory != two.memory or one.end <= two.begin:
            continue
        are_equal = (one.begin, one.end, one.process) == (two.begin, two.end, two.process)
        may_share = one.threads_may_share and two.threads_may_share
        if are_equal and may_share:
            continue
        but = ", or threads of one process the same array" if may_share else ""
        raise InvalidArgument(
            f"{one.name} of rank {rank} and {two.name} of rank {other} overlap in memory, and the "
            f"call writes both: each rank must have memory of its own{but}; nothing was sent"
        )
