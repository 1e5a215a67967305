"""The interface of another engine that decodes in the same benchmark, and what it is given."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import kccl
from kccl.engine.files.checkpoint import Checkpoint

# Characters of a foreign error that are shown.
_CAUSE = 200


@dataclass
class Room:
    """What peers are made of, and what they share.

    Attributes:
        checkpoint: The model.
        context: Tokens to make room for.
        threads: The number of this process's threads, on CPUs.
        rank, world_size: This process's rank, and the number of ranks.
    """

    checkpoint: Checkpoint
    context: int
    threads: int
    rank: int = 0
    world_size: int = 1
    _shared: dict[str, Any] = field(default_factory=dict)

    def shared(self, what: str, make: Callable[[], Any]) -> Any:
        """Makes something for the first peer that asks for it; the others get the same."""
        if what not in self._shared:
            self._shared[what] = make()
        return self._shared[what]

    @cached_property
    def comm(self) -> kccl.Communicator:
        """A communicator of all ranks' GPUs for the peers alone. The first use is collective."""
        return kccl.init(backend=kccl.gpu.backend())

    @cached_property
    def gpu_ordinal(self) -> int:
        """The number of this rank's GPU. The first use is collective."""
        return int(kccl.gpu.device(self.comm.empty(1).device).ordinal)

    def close(self) -> None:
        """Frees what was shared, after the peers have been closed."""
        self._shared.clear()
        if "comm" in vars(self):
            self.comm.close()


class Peer(ABC):
    """Another engine that has opened a model. It decodes greedily, one token at a time.

    Attributes:
        library: The library's name in rows.
        form: The form of the library that is measured; "" if it has only one.
        version: The version of the library.
        backend: "cpu" or "cuda".
        world_size: Ranks that share the model. Above 1 all ranks make the same calls.
    """

    library: str
    form: str = ""
    version: str
    backend: str = "cpu"
    world_size: int = 1

    @abstractmethod
    def reset(self) -> None:
        """Forgets all tokens."""

    @abstractmethod
    def extend(self, ids: Sequence[int]) -> int:
        """Appends a prompt to what rewind() goes back to. Returns the likeliest next id."""

    @abstractmethod
    def step(self, token: int) -> int:
        """Appends a token. Returns the likeliest next id."""

    @abstractmethod
    def rewind(self) -> None:
        """Forgets the tokens of step()."""

    @abstractmethod
    def close(self) -> None:
        """Frees the model."""

    def timed(self, token: int, num_tokens: int) -> tuple[list[int], list[float]]:
        """Decodes after `token`, after rewind(). As Engine.timed(), from the first token on."""
        tokens, times = [], [time.monotonic()]
        for _ in range(num_tokens):
            token = self.step(token)
            tokens.append(token)
            times.append(time.monotonic())
        return tokens, times


def cause_of(error: Exception) -> str:
    """Why a peer is missing, in one line."""
    text = " ".join(str(error).split())[:_CAUSE]
    return text if isinstance(error, kccl.Error) else f"{type(error).__name__}: {text}"
