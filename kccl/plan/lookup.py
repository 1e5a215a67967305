"""Finds the kernels of a collective."""

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
    if not found:
        known = ", ".join(sorted({spec.collective for spec in SPECS}))
        raise InvalidArgument(f"collective is {collective!r}, must be one of {known}")
    return found
