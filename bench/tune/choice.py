"""Chooses the fastest candidate for each measured size, and makes the planner's table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

INDIFFERENCE = 0.05
"""The candidate of the previous size is kept while its time exceeds the best one's by no more than
this fraction plus the spreads of both. So noise does not change the choice.
"""


class Candidate(NamedTuple):
    """An algorithm. On GPUs it has bounds on the shape of its launch.

    Attributes:
        algorithm: The algorithm's name.
        blocks, threads: The bounds, as in kccl's tuning tables; 0 on the host.
    """

    algorithm: str
    blocks: int = 0
    threads: int = 0


class Timing(NamedTuple):
    """The time of a candidate at a size.

    Attributes:
        us: Microseconds per call.
        spread: The interquartile range of the repeats, as a fraction of `us`.
    """

    us: float
    spread: float = 0.0


Times = Mapping[int, Mapping[Candidate, Timing]]
"""Bytes -> candidate -> its timing. A candidate that cannot run at a size is absent there."""


def thresholds(
    collective: str, times: Times, floats_only: Set[str] = frozenset()
) -> list[dict[str, Any]]:
    """Returns the fastest candidate per size, neighbours merged.

    Args:
        collective: Name of the collective.
        times: The measured times.
        floats_only: Algorithms that integers cannot use. After each entry of such an algorithm come
            entries of the fastest others for the same sizes.

    Returns:
        Entries by ascending `up_to_bytes`, the largest measured size for which the candidate was
        chosen. In the last entry it is None: the entry holds for every larger size.
    """
    everything = _merged(times)
    for_all = _merged(
        {
            nbytes: {
                each: timing for each, timing in of.items() if each.algorithm not in floats_only
            }
            for nbytes, of in times.items()
        }
    )
    entries: list[dict[str, Any]] = []
    above = -1.0
    for bound, best in everything:
        entries.append(entry_of(collective, bound, best))
        if best.algorithm in floats_only:
            low = above
            for other_bound, other in for_all:
                if low < bound and other_bound > above:
                    low = min(other_bound, bound)
                    entries.append(entry_of(collective, low, other))
        above = bound
    return entries


def _merged(times: Times) -> list[tuple[float, Candidate]]:
    """Returns (largest size, best candidate), by ascending size. The last size is infinite."""
    merged: list[tuple[float, Candidate]] = []
    for nbytes in sorted(times):
        here = times[nbytes]
        if not here:
            continue
        best = min(here, key=lambda each: here[each].us)
        before = merged[-1][1] if merged else best
        if before in here:
            noise = here[before].spread + here[best].spread
            if here[before].us <= here[best].us * (1 + INDIFFERENCE + noise):
                best = before
        if merged and before == best:
            merged.pop()
        merged.append((nbytes, best))
    return [*merged[:-1], *((math.inf, best) for _, best in merged[-1:])]


def entry_of(collective: str, bound: float, best: Candidate) -> dict[str, Any]:
    """Returns a line of a table: `best` for messages up to `bound` bytes; inf: for all longer
    ones.
    """
    up_to_bytes = None if math.isinf(bound) else int(bound)
    entry = {"collective": collective, "up_to_bytes": up_to_bytes, "algorithm": best.algorithm}
    return entry | ({"blocks": best.blocks, "threads": best.threads} if best.blocks else {})


def updated(
    tuning: dict[str, Any] | None, backend: str, world_size: int, entries: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns a tuning document with these entries in place of the same collectives' at this world
    size.

    Args:
        tuning: the document so far; None if there is none.
        backend: the backend of the entries.
        world_size: the world size of the entries.
        entries: what thresholds() has returned, for one or more collectives.
    """
    tables = {} if tuning is None else {t["world_size"]: dict(t) for t in tuning["tables"]}
    new = {entry["collective"] for entry in entries}
    # Keeps other fields of the table, such as the name of its machine, which are written by hand.
    table = tables.setdefault(world_size, {"world_size": world_size, "thresholds": []})
    kept = [entry for entry in table["thresholds"] if entry["collective"] not in new]
    table["thresholds"] = [*entries, *kept]
    # Keeps the field about the machines on which tables were measured, which is written by hand.
    origin = {} if tuning is None or "origin" not in tuning else {"origin": tuning["origin"]}
    return {
        "backend": backend,
        **origin,
        "tables": [tables[n] for n in sorted(tables)],
    }


def read(path: Path | None, backend: str) -> dict[str, Any] | None:
    """Returns the tuning document of a file that is to be updated; None if there is no such file
    yet.

    Raises:
        ValueError: The file has no tables of tuning, or those of another backend.
    """
    if path is None or not path.exists() or path.stat().st_size == 0:
        return None
    try:
        found = json.loads(path.read_text("utf-8"))
        if not isinstance(found, dict):
            raise TypeError("it holds no JSON object")
        of_backend = found["backend"]
        of_sizes = {table["world_size"]: table["thresholds"] for table in found["tables"]}
    except (ValueError, TypeError, KeyError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"--out {path} exists and is no tuning file ({what}): name another, or delete it"
        ) from error
    if len(of_sizes) < len(found["tables"]):
        raise ValueError(
            f"--out {path} has tables of several machines for one number of ranks: name another "
            "file"
        )
    if of_backend != backend:
        raise ValueError(
            f"--out {path} has tables of backend {of_backend}, and this run is of {backend}: name "
            "another file"
        )
    return found
