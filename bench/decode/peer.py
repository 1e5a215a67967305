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

# The most characters of a foreign error that are shown.
_CAUSE = 200


@dataclass
class Room:
    """What peers need to open the model, and objects that they share.

    Attributes:
        checkpoint: The model.
        context: The number of tokens for which the KV cache needs room.
        threads: The number of threads that a peer uses on CPUs.
        rank, world_size: This process's rank, and the number of ranks.
    """

    checkpoint: Checkpoint
    context: int
    threads: int
    rank: int = 0
    world_size: int = 1
    _shared: dict[str, Any] = field(default_factory=dict)

    def shared(self, what: str, make: Callable[[], Any]) -> Any:
        """Returns the shared object named `what`. The first call makes it by `make`."""
        if what not in self._shared:
            self._shared[what] = make()
        return self._shared[what]

    @cached_property
    def comm(self) -> kccl.Communicator:
        """A communicator of all ranks' GPUs, used by peers only. The first use is collective."""
        return kccl.init(backend=kccl.gpu.backend())

    @cached_property
    def gpu_ordinal(self) -> int:
        """The number of this rank's GPU. The first use is collective."""
        return int(kccl.gpu.device(self.comm.empty(1).device).ordinal)

    def close(self) -> None:
        """Frees the shared objects. The peers must have been closed."""
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
        """Appends a prompt, which rewind() keeps. Returns the likeliest next id."""

    @abstractmethod
    def step(self, token: int) -> int:
        """Appends a token. Returns the likeliest next id."""

    @abstractmethod
    def rewind(self) -> None:
        """Forgets the tokens that step() has appended since the last extend()."""

    @abstractmethod
    def close(self) -> None:
        """Frees the model."""

    def timed(self, token: int, num_tokens: int) -> tuple[list[int], list[float]]:
        """Decodes `num_tokens` tokens after `token`. extend() or rewind() must come first.

        Returns the tokens, and the times before the first and after each, as Engine.timed() does.
        """
        tokens, times = [], [time.monotonic()]
        for _ in range(num_tokens):
            token = self.step(token)
            tokens.append(token)
            times.append(time.monotonic())
        return tokens, times


def cause_of(error: Exception) -> str:
    """Returns the text of an error in one line, as the reason why a peer is missing."""
    text = " ".join(str(error).split())[:_CAUSE]
    return text if isinstance(error, kccl.Error) else f"{type(error).__name__}: {text}"
