"""Tables of what was measured: which algorithm is fastest up to which size."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ..base.errors import InvalidArgument
from .specs import MOST_BLOCKS, MOST_THREADS, SPECS

_TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Threshold:
    """One line of a tuning table: up to this size, this algorithm.

    Attributes:
        collective, up_to_bytes, algorithm: So; None for any size.
        blocks: On GPUs, the most blocks of a call; 0 for what suits the backend.
        threads: On GPUs, threads of a block while there are blocks for them; 0 likewise.
    """

    collective: str
    up_to_bytes: int | None
    algorithm: str
    blocks: int = 0
    threads: int = 0


@dataclass(frozen=True)
class Tuning:
    """Measured choices for one backend, by world size.

    Attributes:
        source: Where the table came from.
        thresholds: World size -> thresholds, sizes ascending within a collective.
        merit: What the table prefers an algorithm for.
    """

    source: str
    thresholds: dict[int, tuple[Threshold, ...]]
    merit: str = "fastest"

    def of(self, world_size: int) -> tuple[Threshold, ...]:
        """The table for a world size: its own, else the nearest larger, else the largest."""
        larger = [size for size in self.thresholds if size >= world_size]
        return self.thresholds[min(larger) if larger else max(self.thresholds)]


def read_tuning(path: Path) -> Tuning:
    """Reads a tuning file as `bench/tune/tune.py` writes it.

    Raises:
        InvalidArgument: The file is not such a table.
    """
    try:
        document = json.loads(path.read_text())
        merit = str(document.get("merit", Tuning.merit))
        tables = {
            int(table["world_size"]): tuple(Threshold(**line) for line in table["thresholds"])
            for table in document["tables"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path} is no tuning table: {error}") from error
    for line in (line for table in tables.values() for line in table):
        is_shape = 0 < line.blocks <= MOST_BLOCKS and 0 < line.threads <= MOST_THREADS
        if (line.blocks, line.threads) != (0, 0) and not (is_shape and line.threads % 32 == 0):
            raise InvalidArgument(f"{path} has {line.blocks} blocks of {line.threads} threads")
    known = {spec.name for spec in SPECS}
    unknown = {line.algorithm for table in tables.values() for line in table} - known
    if unknown or not tables:
        raise InvalidArgument(f"{path} names {sorted(unknown)}, known are {sorted(known)}")
    return Tuning(str(path), tables, merit)


@lru_cache(maxsize=8)
def tuning_for(backend: str, path: str = "") -> Tuning:
    """The installed table of a backend, or the one at `path`."""
    return read_tuning(Path(path) if path else _TABLES / f"{backend}.json")
