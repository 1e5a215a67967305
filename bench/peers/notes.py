"""Notes about peers that could not be measured, and why. No peer is left out silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..harness.problem import Comm


class PeerNotes:
    """Collects notes about missing peers. All ranks have the same notes."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        # (peer, cause) -> the sizes in bytes that the peer has no rows for; None: all sizes.
        self._missing: dict[tuple[str, str], list[int | None]] = {}

    def agree(self, peer: str, nbytes: int | None, act: Callable[[], Any]) -> bool:
        """Calls `act` on all ranks. If it raises on any rank, adds a note and returns False on all.
        Collective.
        """
        cause = None
        try:
            act()
        # A foreign library may raise any exception. Its text tells why the peer is not measured.
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
        causes = self._comm.gather_objects(cause)
        known = next((each for each in causes if each is not None), None)
        if known is not None:
            self.add(peer, known, nbytes)
        return known is None

    def add(self, peer: str, cause: str, nbytes: int | None) -> None:
        """Adds a note that a peer has no rows at a size in bytes, or at any size if None."""
        self._missing.setdefault((peer, cause), []).append(nbytes)

    def take(self) -> list[str]:
        """Returns one sentence for each missing peer. Then drops notes about single sizes, and
        keeps notes about all sizes.
        """
        missing = self._missing
        self._missing = {key: [None] for key, sizes in missing.items() if None in sizes}
        return [
            f"no {peer} rows"
            + (f" at {', '.join(map(str, sizes))} bytes" if any(sizes) else "")
            # Takes only the first line, because torch's errors contain a stack trace.
            + f": {(cause.splitlines() or [''])[0]}"
            for (peer, cause), sizes in missing.items()
        ]
