"""Prints the error messages of a command's ranks. A message that all ranks have is printed once."""

import os
from typing import TYPE_CHECKING

from ..base.errors import Error
from ..ranks import launchers
from .parser import complain

if TYPE_CHECKING:
    from ..ranks.mesh import Mesh

# The timeout in seconds when ranks exchange their messages. Most ranks end at the same time.
_PATIENCE_S = 6.0


class Complaints:
    """Compares the error messages of a command's ranks. In a process without peers it only prints.

    It has its own sockets, because the command's communicator may have failed, or may not exist
    yet.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._mesh: Mesh | None = None

    def meet(self, rank: int) -> None:
        """Connects with the other ranks of the job. Collective.

        Raises:
            kccl.Error: As in kccl.init(). But a wrong environment variable is ignored, because
                kccl.init() reports it.
        """
        self._rank = rank
        if launchers.is_one_of_several(os.environ):
            # Imported here, so that a command without peers starts faster.
            from ..base.env import read_what_is_right
            from ..ranks import bootstrap, job

            env = read_what_is_right()
            job.check_namespaces(env.namespaces)
            job.claim(os.environ)
            self._mesh = bootstrap.connect(bootstrap.detect(env, os.environ), env.first_timeout)

    def say(self, message: str | None) -> None:
        """Prints this rank's error message, unless a lower rank has the same. `message` is None if
        this rank has none.

        Collective, and the last call before close(). A rank that cannot reach the others within
        _PATIENCE_S prints its message.
        """
        everyone: list[str | None] = []
        if self._mesh is not None:
            from ..ranks import agreement

            try:
                everyone = agreement.gather_objects(self._mesh, message, _PATIENCE_S)
            except Error:
                everyone = []
        if message is None:
            return
        lower = enumerate(everyone[: self._rank])
        if not any(text and self._tells(text, rank, message) for rank, text in lower):
            complain(f"rank {self._rank}: {message}" if self._rank != 0 else message)

    def _tells(self, text: str, rank: int, message: str) -> bool:
        """Returns whether the message `text` of another rank says what this rank's message says."""
        if _anyones(text, rank) == _anyones(message, self._rank):
            return True
        # The other rank may quote this rank's error, perhaps cut short (ranks/refusal.py).
        _, heard, cause = text.partition(f" failed on rank {self._rank}: ")
        return heard != "" and message.startswith(cause.removesuffix("..."))

    def close(self) -> None:
        """Closes the sockets to the other ranks."""
        if self._mesh is not None:
            self._mesh.close()


def _anyones(text: str, rank: int) -> str:
    """Returns a message without the number of its rank, to compare the messages of two ranks."""
    return text.replace(f"rank {rank}:", "rank N:")
