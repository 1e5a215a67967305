"""Divides the ranks of a large communicator into teams."""

from dataclasses import dataclass
from functools import cached_property

from ..base.abi import MAX_WORLD_SIZE

# A rank's teams, as KcclTeams of csrc/host/chain.inc numbers them.
OWN_GROUP, ACROSS_GROUPS = 0, 1
MOST_GROUPED_RANKS = 64
"""Most ranks of a communicator that has groups: 8 groups of 8."""


@dataclass(frozen=True)
class Grouping:
    """The groups of a communicator's ranks, and the teams across them.

    A rank's place is its index in its group. If all groups have the same size, the ranks at the
    same place of all groups are a team. Otherwise the leaders of the groups, their first ranks, are
    a team, and every other rank is a team alone.

    Attributes:
        groups: The ranks of each group.
        are_nodes: True if the groups are nodes, which exchange by MPI.
    """

    groups: tuple[tuple[int, ...], ...]
    are_nodes: bool = False

    @cached_property
    def world_size(self) -> int:
        """Returns the number of ranks."""
        return sum(map(len, self.groups))

    @cached_property
    def is_even(self) -> bool:
        """Tells whether all groups have the same size."""
        return len(set(map(len, self.groups))) == 1

    @cached_property
    def order(self) -> tuple[int, ...]:
        """Returns all ranks, group by group."""
        return tuple(rank for group in self.groups for rank in group)

    @cached_property
    def is_consecutive(self) -> bool:
        """Tells whether `order` is rank order."""
        return self.order == tuple(range(self.world_size))

    def runs(self, padded: int) -> list[tuple[int, int, int]]:
        """Returns runs of consecutive ranks as (first rank, its position, number of ranks).

        Positions count group by group. Each group takes `padded` positions.
        """
        runs: list[tuple[int, int, int]] = []
        position = 0
        for group in self.groups:
            for i, rank in enumerate(group):
                first, at, length = runs[-1] if runs else (-1, -1, 0)
                if (rank, position + i) == (first + length, at + length):
                    runs[-1] = first, at, length + 1
                else:
                    runs.append((rank, position + i, 1))
            position += padded
        return runs

    def place(self, rank: int) -> tuple[int, int]:
        """Returns the number of a rank's group, and the rank's place in the group."""
        return next((g, group.index(rank)) for g, group in enumerate(self.groups) if rank in group)

    def teams_of(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ranks of a rank's own group, and of its team across groups."""
        number, place = self.place(rank)
        group = self.groups[number]
        if self.is_even or place == 0:
            return group, tuple(each[place] for each in self.groups)
        return group, (rank,)

    def refusal(self, what: str) -> str:
        """Returns the error's text for a call of one team only; `what` is as in "windows are"."""
        if self.are_nodes:
            listed = "; ".join(map(_listed, self.groups))
            return (
                f"the ranks are on {len(self.groups)} nodes (ranks {listed}), and {what} for ranks "
                "that share memory: use a part of the communicator, which comm.split(comm.node) "
                "makes"
            )
        return (
            f"world_size is {self.world_size}, and {what} for at most {MAX_WORLD_SIZE} ranks: "
            "use it in a part of the communicator, which comm.split() makes"
        )

    def explain(self, rank: int) -> str:
        """Returns the teams of a rank in words."""
        group, across = self.teams_of(rank)
        sizes = "/".join(map(str, dict.fromkeys(map(len, self.groups))))
        alone = "" if len(across) > 1 else "; only the first ranks of the groups meet the others"
        what = "nodes" if self.are_nodes else "groups"
        return (
            f"{len(self.groups)} {what} of {sizes} ranks. Rank {rank} is in the group "
            f"{_listed(group)} and in the team across groups {_listed(across)}{alone}"
        )


def _listed(ranks: tuple[int, ...]) -> str:
    is_run = len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]}-{ranks[-1]}" if is_run else ", ".join(map(str, ranks))
