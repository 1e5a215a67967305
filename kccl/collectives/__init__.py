"""The collectives of a communicator, one in each file: what their arguments mean."""

from typing import Any, get_type_hints

from .all_gather import AllGather
from .all_reduce import AllReduce
from .all_reduce_rms_norm import AllReduceRmsNorm
from .all_to_all import AllToAll
from .barrier import Barrier
from .broadcast import Broadcast
from .context import Context
from .gather import Gather
from .reduce import Reduce
from .reduce_scatter import ReduceScatter
from .reduce_scatter_rms_norm import ReduceScatterRmsNorm
from .scan import Scan
from .scatter import Scatter


class Collectives:
    """The collectives of a communicator, a part of Communicator.

    A collective that is named here is an attribute of every communicator. C answers the calls,
    without a Python frame in between.
    """

    __slots__ = ()
    all_gather: AllGather
    all_reduce: AllReduce
    all_reduce_rms_norm: AllReduceRmsNorm
    all_to_all: AllToAll
    barrier: Barrier
    broadcast: Broadcast
    gather: Gather
    reduce: Reduce
    reduce_scatter: ReduceScatter
    reduce_scatter_rms_norm: ReduceScatterRmsNorm
    scan: Scan
    scatter: Scatter


KINDS: dict[str, Any] = get_type_hints(Collectives)
"""The classes of the collectives, by the names of the communicator's attributes."""

TEXTS = {name: kind.__doc__ for name, kind in KINDS.items()}
"""The text that help() shows for each collective."""


def make_all(owner: Collectives, context: Context) -> None:
    """Gives a communicator its collectives."""
    for name, kind in KINDS.items():
        setattr(owner, name, kind.of(context))


def forget_all(owner: Collectives) -> None:
    """Drops the calls that a communicator's collectives know, and the memory that they keep."""
    for name in KINDS:
        getattr(owner, name).forget()
