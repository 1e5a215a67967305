"""What the ranks of a command complain of. What all of them find, one of them says."""

import os
from typing import TYPE_CHECKING

from ..base.errors import Error
from ..ranks import launchers
from .parser import complain

if TYPE_CHECKING:
    from ..ranks.mesh import Mesh

# Seconds that a rank waits for what the others say. Most of them end at the same time.
_PATIENCE_S = 6.0


class Complaints:
    """The complaints of a command that all ranks of a job run. Outside of a job it does nothing.

    It has sockets of its own, because the command's communicator may have failed, or may not exist
    yet.
    """

    def __init__(self) -> None:
        self._rank = 0
        self._mesh: Mesh | None = None

    def meet(self, rank: int) -> None:
        """Finds the other ranks of this one. Collective.

        Raises:
            kccl.Error: As kccl.init(), but a variable that is wrong is left to that.
        """
        self._rank = rank
        if launchers.is_one_of_several(os.environ):
            # A command without ranks starts faster without them.
            from ..base.env import read_what_is_right
            from ..ranks import bootstrap, job

            env = read_what_is_right()
            job.check_namespaces(env.namespaces)
            job.claim(os.environ)
            self._mesh = bootstrap.connect(bootstrap.detect(env, os.environ), env.first_timeout)

    def say(self, message: str | None) -> None:
        """Prints a complaint, unless a lower rank has it too. None: this rank has none.

        Collective, and the end: who hears nothing from the others prints.
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
        """Whether another rank's complaint has what this one complains of."""
        if _anyones(text, rank) == _anyones(message, self._rank):
            return True
        # That rank may have heard of it from this one. What it hears may be cut (ranks/refusal.py).
        _, heard, cause = text.partition(f" failed on rank {self._rank}: ")
        return heard != "" and message.startswith(cause.removesuffix("..."))

    def close(self) -> None:
        """Leaves the others."""
        if self._mesh is not None:
            self._mesh.close()


def _anyones(text: str, rank: int) -> str:
    """A complaint without the number of the rank that makes it."""
    return text.replace(f"rank {rank}:", "rank N:")
