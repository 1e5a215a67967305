"""Presents the states of a rank with several teams (groups of at most 8 ranks, kccl/ranks/team.py)
to Python as one KcclState.
"""

from collections.abc import Sequence
from typing import Any


class TeamState:
    """Stands for the communicator's KcclState. Its timeouts and its status are set for all teams,
    too.

    Attributes:
        own: The communicator's KcclState.
    """

    def __init__(self, own: Any, of_teams: Sequence[Any]) -> None:
        self.own = own
        self._all = (own, *of_teams)

    def _set(self, name: str, value: int) -> None:
        for each in self._all:
            setattr(each, name, value)

    @property
    def status(self) -> int:
        """Returns the KcclState.status. Setting it sets it for the teams, too."""
        return int(self.own.status)

    @status.setter
    def status(self, value: int) -> None:
        self._set("status", value)

    @property
    def limit_ns(self) -> int:
        """Returns the KcclState.limit_ns. chain.cpp computes each step's timeout from it."""
        return int(self.own.limit_ns)

    @limit_ns.setter
    def limit_ns(self, value: int) -> None:
        self._set("limit_ns", value)

    @property
    def first_limit_ns(self) -> int:
        """Returns the KcclState.first_limit_ns, as limit_ns."""
        return int(self.own.first_limit_ns)

    @first_limit_ns.setter
    def first_limit_ns(self, value: int) -> None:
        self._set("first_limit_ns", value)

    @property
    def contacted(self) -> int:
        """Returns the KcclState.contacted."""
        return int(self.own.contacted)

    @property
    def record(self) -> Any:
        """Returns the KcclState.record, with the communicator's numbers of ranks."""
        return self.own.record
