"""Writes up to which sizes KCCL makes NCCL's calls: the table of libkccl_nccl.so.

    python -m kccl.bench.tune.nccl > kccl/interop/nccl_reaches.json

A size counts if NCCL takes MARGIN times as long in the newest records of H200, in CUDA graphs and
called one by one, at that size and at every smaller one that was measured. The margin is there
because these records are without NVLink multicast, which NCCL may use.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "records"
MARGIN = 1.25
FILES = ("nvidia-h200_2_make_gpu.jsonl", "nvidia-h200_4_make_gpu.jsonl")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
MODES = ("graph", "eager")

Key = tuple[int, str]
"""World size and collective."""


def reaches() -> list[dict[str, Any]]:
    """Returns a line for each world size and collective that was measured."""
    ratios: dict[Key, dict[int, float]] = {}
    for rows in map(_rows, FILES):
        for key, of_size in _ratios(rows).items():
            ratios.setdefault(key, {}).update(of_size)
    lines = []
    for (world_size, collective), of_size in sorted(ratios.items()):
        up_to_bytes = 0
        for nbytes, ratio in sorted(of_size.items()):
            if ratio < MARGIN:
                break
            up_to_bytes = nbytes
        line = {"world_size": world_size, "collective": collective, "up_to_bytes": up_to_bytes}
        lines.append(line)
    return lines


def text() -> str:
    """Returns the table's file."""
    origin = (
        f"NCCL takes at least {MARGIN} times as long, by bench/records of 2 and 4 H200, without "
        "multicast; 8 ranks use the lines of 4"
    )
    return json.dumps({"origin": origin, "reaches": reaches()}, indent=2) + "\n"


def _rows(name: str) -> list[Mapping[str, Any]]:
    text = (RECORDS / name).read_text("utf-8")
    return [row for line in text.splitlines() for row in json.loads(line)["rows"]]


def _ratios(rows: Iterable[Mapping[str, Any]]) -> dict[Key, dict[int, float]]:
    """Returns for each size the least ratio of NCCL's time to KCCL's, over the modes."""
    best: dict[tuple[Any, ...], float] = {}
    for row in rows:
        if row.get("library") in ("kccl", "nccl") and row.get("mode") in MODES:
            if row["collective"] not in COLLECTIVES:
                continue
            key = (row["world_size"], row["collective"], row["bytes"], row["mode"], row["library"])
            best[key] = min(row["time_us"], best.get(key, row["time_us"]))
    found: dict[Key, dict[int, float]] = {}
    for (world_size, collective, nbytes, mode, library), kccl_us in best.items():
        nccl_us = best.get((world_size, collective, nbytes, mode, "nccl"))
        if library == "kccl" and nccl_us is not None:
            of_size = found.setdefault((world_size, collective), {})
            of_size[nbytes] = min(nccl_us / kccl_us, of_size.get(nbytes, nccl_us / kccl_us))
    return found


if __name__ == "__main__":
    print(text(), end="")
