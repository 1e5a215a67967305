"""A message of shrink(): what the sender knows of the ranks. survivors.py has the agreement."""

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Said:
    """What a rank in shrink() knows, as it tells its peers.

    Attributes:
        attempt: The attempt that the rank is in.
        ended: The peers whose connections have ended for the rank.
        name: The name of the rank's listener; "" while it does not listen in this attempt.
        votes: The votes of this attempt that the rank knows: voter -> members it voted for.
        refused: The last attempt in which the rank could not make the communicator; 0 for none.
        reason: Why it could not.
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
