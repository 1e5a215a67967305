"""Tuning tables: which algorithm was measured as the fastest up to which size."""

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ..base.errors import InvalidArgument
from . import specs
from .specs import MOST_BLOCKS, MOST_THREADS, SPECS

_TABLES = Path(__file__).parent / "tables"
# Backends on which nothing is measured yet -> the backend whose table is the best guess.
_BORROWED = {"hip": "cuda"}
_UNMEASURED = "the first of the collective's kernels; nothing is measured"


@dataclass(frozen=True)
class Threshold:
    """One line of a tuning table: the algorithm to use up to a size.

    Attributes:
        collective: The collective.
        up_to_bytes: The largest message, in bytes; None for any size.
        algorithm: The algorithm to use.
        blocks: On GPUs, the most blocks of a call; 0 for the backend's default.
        threads: On GPUs, the threads of a block until all blocks are used, and more for longer
            messages; 0 for the backend's default.
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
        source: Path of the table.
        thresholds: World size -> thresholds, by ascending size within a collective.
        origin: On which machines the table was measured, for Plan.reason.
    """

    source: str
    thresholds: dict[int, tuple[Threshold, ...]]
    origin: str = ""

    def of(self, world_size: int) -> tuple[Threshold, ...]:
        """The table for a world size: its own, or else the nearest larger, or else the largest."""
        larger = [size for size in self.thresholds if size >= world_size]
        return self.thresholds[min(larger) if larger else max(self.thresholds)]


def read_tuning(path: Path) -> Tuning:
    """Reads a tuning file that `bench/tune/tune.py` wrote.

    Raises:
        InvalidArgument: The file is not a tuning table.
    """
    try:
        document = json.loads(path.read_text())
        origin = str(document.get("origin", ""))
        tables = {
            int(table["world_size"]): tuple(Threshold(**line) for line in table["thresholds"])
            for table in document["tables"]
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{path} is not a tuning table: {error}") from error
    for line in (line for table in tables.values() for line in table):
        is_shape = 0 < line.blocks <= MOST_BLOCKS and 0 < line.threads <= MOST_THREADS
        if (line.blocks, line.threads) != (0, 0) and not (is_shape and line.threads % 32 == 0):
            raise InvalidArgument(
                f"{path} has {line.blocks} blocks of {line.threads} threads, must have 1 to "
                f"{MOST_BLOCKS} blocks, and threads by multiples of 32 up to {MOST_THREADS}"
            )
    known = {spec.name for spec in SPECS}
    unknown = {line.algorithm for table in tables.values() for line in table} - known
    if unknown:
        names = ", ".join(sorted(unknown))
        raise InvalidArgument(
            f"{path} names unknown algorithms: {names}; must be of {', '.join(sorted(known))}"
        )
    if not tables:
        raise InvalidArgument(f"{path} has no tables, must have one for each world size measured")
    return Tuning(str(path), tables, origin)


@lru_cache(maxsize=8)
def tuning_for(backend: str, path: str = "") -> Tuning:
    """The installed table of a backend, or the one at `path`."""
    if backend == "sim" and not path:
        return _of_simulator()
    if backend in _BORROWED and not path:
        found = read_tuning(_TABLES / f"{_BORROWED[backend]}.json")
        return replace(found, origin=f"{found.origin}; nothing is measured on {backend}")
    return read_tuning(Path(path) if path else _TABLES / f"{backend}.json")


def _of_simulator() -> Tuning:
    """The first kernel of each collective: the simulator measures none, and runs those of GPUs."""
    first: dict[str, str] = {}
    for spec in SPECS:
        if "sim" in spec.targets:
            first.setdefault(spec.collective, spec.name)
    lines = (Threshold(collective, None, name) for collective, name in first.items())
    return Tuning(specs.__file__, {1: tuple(lines)}, _UNMEASURED)
