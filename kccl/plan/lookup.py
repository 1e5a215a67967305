"""Finds the kernels of a collective."""

from collections.abc import Iterable

from ..base.errors import InvalidArgument
from .spec import KernelSpec
from .specs import SPECS


def algorithms(collective: str) -> list[str]:
    """Returns the names of the algorithms of a collective.

    Raises:
        InvalidArgument: There is no such collective.
    """
    return [spec.name for spec in of_collective(collective)]


def of_collective(collective: str) -> list[KernelSpec]:
    """Returns the kernels among which a plan of a collective chooses.

    Raises:
        InvalidArgument: There is no such collective.
    """
    found = [spec for spec in SPECS if spec.collective == collective]
    check_collective(collective)
    return found


def check_collective(collective: str, others: Iterable[str] = ()) -> None:
    """Raises InvalidArgument unless it is a collective that is planned, or one of `others`."""
    known = sorted({*(spec.collective for spec in SPECS), *others})
    if collective not in known:
        raise InvalidArgument(f"collective is {collective!r}, must be one of {', '.join(known)}")
