"""Keeps a rank's panels in a file (files/packed_cache.py), which has a section for each op with
weights.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from ..base.closing import Closing
from ..base.core import FILE
from ..files.checkpoint import Checkpoint
from ..files.packed_cache import CHUNK, PackedCache, PackedFile, identity


class KeptPanels(Closing):
    """A rank's panels in a file. Without a folder there is none, and no panels are kept."""

    def __init__(
        self,
        cache: PackedCache | None,
        checkpoint: Checkpoint,
        rank: int,
        world_size: int,
        sizes: Mapping[int, int],
        memory: NDArray[np.uint8],
    ) -> None:
        """Opens the file.

        Args:
            cache: The folder, or None.
            checkpoint: The model.
            rank, world_size: The rank.
            sizes: Op index -> the bytes of its panels, in the order of the program.
            memory: The panels of all ops, in this order.
        """
        self._file: PackedFile | None = None
        if cache is None:
            return
        facts = {"target": ["host", identity(FILE)]}
        ends = np.cumsum([*sizes.values()]).tolist()
        self._memory = memory
        # Each op that has panels, and where these lie.
        self._places = {
            op: slice(end - size, end)
            for (op, size), end in zip(sizes.items(), ends, strict=True)
            if size
        }
        self._sections = {op: number for number, op in enumerate(self._places)}
        sections = [sizes[op] for op in self._places]
        self._file = cache.open(checkpoint, facts, rank, world_size, sections)

    def load(self) -> set[int]:
        """Reads the panels that the file has. Returns the ops' indices."""
        found: set[int] = set()
        if self._file is None:
            return found
        ops = [*self._places]
        for number, data in self._file.verified():
            self._memory[self._places[ops[number]]] = np.frombuffer(data, np.uint8)
            found.add(ops[number])
        return found

    def store(self, op: int) -> None:
        """Writes an op's panels to the file."""
        if self._file is not None and op in self._places:
            self._file.store(self._sections[op], self._chunks(self._memory[self._places[op]]))

    def finish(self) -> None:
        """Must be called when the file has the panels of all ops."""
        if self._file is not None:
            self._file.finish()

    def close(self) -> None:
        """Closes the file. An unfinished one is finished by the next start."""
        if self._file is not None:
            self._file.close()

    @staticmethod
    def _chunks(panels: NDArray[np.uint8]) -> Iterator[NDArray[np.uint8]]:
        for at in range(0, len(panels), CHUNK):
            yield panels[at : at + CHUNK]
