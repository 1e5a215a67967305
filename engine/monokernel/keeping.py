"""Keeps a rank's packed weights in a file (files/packed_cache.py), which has a section for each
layer, and one for the head.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import kccl

from ..files.checkpoint import Checkpoint
from ..files.packed_cache import CHUNK, PackedCache
from ..model.program import Program
from .memory import Arena
from .shape import Tuning

# The fields of Tuning that packed weights do not depend on, and that commands set differently.
_FREE = {"columns", "seats", "delay_ns", "slow_rank"}
_NUMBER = np.dtype(np.uint64)


class Locating(Protocol):
    """What Kept needs of Grids (launching.py)."""

    def locate(self, to: int) -> None:
        """Runs locate() of kernels/pack.cuh with an address."""

    @property
    def target(self) -> list[str | int]:
        """Returns the target that the kernels are compiled for."""


class Kept:
    """A rank's packed weights in a file."""

    def __init__(
        self,
        cache: PackedCache,
        checkpoint: Checkpoint,
        program: Program,
        comm: kccl.Communicator,
        tuning: Tuning,
        arena: Arena,
        where: Locating,
    ) -> None:
        """Asks the device where each layer lies, and opens the file. Collective.

        Args:
            cache: The folder.
            checkpoint, program, comm, tuning, arena: The model, the rank, and its memory.
            where: Tells where packed weights lie.
        """
        nbytes = _NUMBER.itemsize * (2 * tuning.blocks + 2)
        numbers = arena.allocate(nbytes)
        where.locate(numbers)
        found = np.frombuffer(arena.read(numbers, nbytes), _NUMBER)
        streams, of_blocks = np.split(found[:-1], [tuning.blocks + 1])
        self._arena = arena
        self._sections = sections_of(streams, of_blocks, int(found[-1]), program.config.num_layers)
        facts = {
            "tuning": {name: x for name, x in asdict(tuning).items() if name not in _FREE},
            "target": where.target,
        }
        sizes = [sum(nbytes for _, nbytes in each) for each in self._sections]
        self._file = cache.open(checkpoint, facts, comm.rank, comm.world_size, sizes)

    def load(self, weights: int) -> Iterator[int]:
        """Copies the layers that the file has to the packed weights at an address. Yields the
        number of each; the head's is the number of layers.
        """
        for number, data in self._file.verified():
            at = 0
            for start, nbytes in self._sections[number]:
                part = np.frombuffer(data[at : at + nbytes], np.uint8)
                self._arena.write(weights + start, part)
                at += nbytes
            yield number

    def store(self, layer: int, weights: int) -> None:
        """Writes a layer, or the head, of the packed weights at an address to the file."""
        self._file.store(layer, self._chunks(self._sections[layer], weights))

    def finish(self) -> None:
        """Must be called when the file has all layers."""
        self._file.finish()

    def close(self) -> None:
        """Closes the file. An unfinished one is finished by the next start."""
        self._file.close()

    def _chunks(self, section: list[tuple[int, int]], weights: int) -> Iterator[NDArray[np.uint8]]:
        """Reads a section, CHUNK bytes at a time."""
        rest = sum(nbytes for _, nbytes in section)
        chunk, filled = np.empty(min(CHUNK, rest), np.uint8), 0
        for start, nbytes in section:
            at = 0
            while at < nbytes:
                some = min(nbytes - at, len(chunk) - filled)
                self._arena.read_into(chunk[filled : filled + some], weights + start + at)
                at, filled, rest = at + some, filled + some, rest - some
                if filled == len(chunk):
                    yield chunk
                    chunk, filled = np.empty(min(CHUNK, rest), np.uint8), 0


def sections_of(
    streams: NDArray[Any], of_blocks: NDArray[Any], of_experts: int, num_layers: int
) -> list[list[tuple[int, int]]]:
    """Returns where each layer lies in packed weights, and at last the head: parts, each with its
    offset and its bytes.

    Args:
        streams: Where each block's weight stream begins, and where the last one ends. Experts lie
            behind that, layer by layer.
        of_blocks: The bytes of a layer in each block's weight stream.
        of_experts: The bytes of a layer's experts.
        num_layers: The number of layers.
    """
    begins, sizes = streams[:-1].astype(int), of_blocks.astype(int)
    found = []
    for layer in range(num_layers):
        parts = [*zip((begins + layer * sizes).tolist(), sizes.tolist(), strict=True)]
        found.append([*parts, (int(streams[-1]) + layer * of_experts, of_experts)])
    heads = begins + num_layers * sizes
    found.append([*zip(heads.tolist(), (streams[1:].astype(int) - heads).tolist(), strict=True)])
    return [[(start, nbytes) for start, nbytes in parts if nbytes] for parts in found]
