"""A message of a rank in shrink(): what it knows of the others. survivors.py has the agreement."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Said:
    """The knowledge of a rank: its attempt, the ranks it does not hear, its listener's name, the
    votes.

    The name is "" while the rank knows of the attempt and does not take part yet. The votes are
    those of this attempt: rank -> members. `refused` is the last attempt in which this rank could
    not make the communicator, 0 for none, and `reason` says why.
    """

    attempt: int
    ended: frozenset[int]
    name: str
    votes: dict[int, tuple[int, ...]]
    refused: int = 0
    reason: str = ""

    @classmethod
    def parse(cls, text: bytes) -> "Said":
        said: dict[str, Any] = json.loads(text)
        votes = {rank: tuple(members) for rank, members in said["votes"]}
        why = said["refused"], said["reason"]
        return cls(said["attempt"], frozenset(said["ended"]), said["name"], votes, *why)

    def text(self) -> bytes:
        said = {
            "attempt": self.attempt,
            "ended": sorted(self.ended),
            "name": self.name,
            "votes": sorted(self.votes.items()),
            "refused": self.refused,
            "reason": self.reason,
        }
        return json.dumps(said).encode()
