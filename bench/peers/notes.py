"""What peers could not be measured, and why: a sentence each. Nothing is left out silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..harness.collective import Comm


class PeerNotes:
    """Kept by all ranks alike."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        # (peer, cause) -> sizes, None: whatever is asked for.
        self._missing: dict[tuple[str, str], list[int | None]] = {}

    def agree(self, peer: str, nbytes: int | None, act: Callable[[], Any]) -> bool:
        """Does it on all ranks; False, and a note, when it fails on any. Collective."""
        cause = None
        try:
            act()
        # Whatever a foreign library raises is a reason why it is not measured.
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
        causes = self._comm.gather_objects(cause)
        known = next((each for each in causes if each is not None), None)
        if known is not None:
            self.add(peer, known, nbytes)
        return known is None

    def add(self, peer: str, cause: str, nbytes: int | None) -> None:
        """A peer without rows of a size; None: for good."""
        self._missing.setdefault((peer, cause), []).append(nbytes)

    def take(self) -> list[str]:
        """A sentence for each peer that was missing since this was last asked, or is for good."""
        missing = self._missing
        self._missing = {key: [None] for key, sizes in missing.items() if None in sizes}
        return [
            f"no {peer} rows"
            + (f" at {', '.join(map(str, sizes))} bytes" if any(sizes) else "")
            # One line: torch's errors bring a stack.
            + f": {(cause.splitlines() or [''])[0]}"
            for (peer, cause), sizes in missing.items()
        ]
