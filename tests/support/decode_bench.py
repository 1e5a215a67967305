"""`kccl bench decode` in this process, for tests."""

from __future__ import annotations

import json
from typing import Any

from kccl.bench.decode.peer import Peer, Room
from kccl.engine.executors.reference import Cache, Reference
from kccl.tools import cli as command

FAST = ("--new-tokens", "5", "--repeats", "3")


def bench(*arguments: str) -> int:
    return command.main(["bench", "decode", *FAST, *arguments])


def document_of(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.splitlines()[-1])
    return found


class ReferenceAsPeer(Peer):
    """The NumPy reference as another engine."""

    library = "reference"
    version = "1"

    def __init__(self, room: Room) -> None:
        self._reference = Reference(room.checkpoint)
        self.reset()

    def reset(self) -> None:
        self._cache, self._length = Cache(), 0

    def extend(self, ids: Any) -> int:
        self._length += len(ids)
        return int(self._reference.logits(ids, self._cache)[-1].argmax())

    def step(self, token: int) -> int:
        return int(self._reference.logits([token], self._cache)[-1].argmax())

    def rewind(self) -> None:
        self._cache.length = self._length

    def close(self) -> None:
        pass
