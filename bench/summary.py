"""Makes the table of README: a line for each call or token, from the newest record that has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .decode.report import MODEL_NAMES
from .harness.document import Document, load
from .harness.measure import Row

_HOST, _TWO_GPUS = "intel-xeon-2-cores_2", "nvidia-h200_2_make_gpu"
_ONE_SIDED, _HOST_DECODE = "amd-epyc-2-cores_2", "amd-epyc-2-cores_decode"
_HEAD = "| | bytes | on | KCCL | best peer | | peer / KCCL |\n|---|---:|---|---:|---:|---|---:|\n"
NAMES = {
    "nccl": "NCCL",
    "torch_symm_mem": "PyTorch",
    "flashinfer": "FlashInfer",
    "nvshmem": "NVSHMEM",
    "mpich": "MPICH",
    "openmpi": "Open MPI",
    "torch": "PyTorch",
    "torch+nccl": "PyTorch, NCCL",
    "torch+kccl": "PyTorch, sums by KCCL",
}
"""Name of a library in records -> its name in tables."""


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        record: The name of a file in bench/records, without its suffix.
        what: A description of what is timed.
        problem: Fields that KCCL's row and the peers' rows must have.
        ours: Further fields that KCCL's row must have.
    """

    record: str
    what: str
    problem: dict[str, Any]
    ours: dict[str, Any]


def _in_a_graph(collective: str, num_bytes: int) -> Line:
    problem = {"collective": collective, "mode": "graph", "bytes": num_bytes}
    return Line(_TWO_GPUS, f"{collective} in a CUDA graph", problem, {})


def _prepared(record: str, what: str, collective: str, num_bytes: int) -> Line:
    problem = {"collective": collective, "mode": "eager", "bytes": num_bytes}
    return Line(record, f"{what}, `op()`", problem, {"call": "prepared"})


def _decode(record: str, model: str, ranks: int, position: int) -> Line:
    problem = {"model": model, "world_size": ranks, "position": position, "dtype": "bfloat16"}
    return Line(record, f"one token of {MODEL_NAMES[model]}", problem, {"ablated": None})


LINES = (
    _in_a_graph("all_reduce", 8 << 10),
    _in_a_graph("all_reduce", 1 << 20),
    _in_a_graph("all_gather", 64 << 10),
    _in_a_graph("reduce_scatter", 64 << 10),
    Line(
        _TWO_GPUS,
        "all_reduce within a kernel",
        {"collective": "all_reduce", "mode": "in_kernel", "bytes": 8 << 10, "complete": "slice"},
        {},
    ),
    _decode("nvidia-h200_2_decode", "laneformer-2b", 2, 512),
    _prepared(_HOST, "all_reduce", "all_reduce", 8),
    _prepared(_HOST, "all_reduce", "all_reduce", 64 << 10),
    _prepared(_HOST, "broadcast", "broadcast", 128 << 10),
    _prepared(_ONE_SIDED, "halo exchange by put", "put", 1 << 10),
    _decode(_HOST_DECODE, "llama-1b", 1, 128),
    _decode(_HOST_DECODE, "smollm2", 1, 128),
)


def table(records: Path) -> str:
    """Returns the table, and below it the commits of its figures.

    Raises:
        ValueError: A line's record has no such row.
    """
    lines: list[str] = []
    commits: dict[str, list[str]] = {}
    for line in LINES:
        document, ours, best = _find(line, records)
        where = _machine(document)
        found = commits.setdefault(where, [])
        if document["commit"] not in found:
            found.append(document["commit"])
        cells = [line.what, f"{ours['bytes']:,}" if "bytes" in ours else "", where]
        cells += [_text(_us(ours)), *_peer(best, _us(ours))]
        lines.append("| " + " | ".join(cells) + " |\n")
    sources = "; ".join(f"{where}: {', '.join(found)}" for where, found in commits.items())
    return _HEAD + "".join(lines) + f"\nMicroseconds, medians. Commits: {sources}.\n"


def _find(line: Line, records: Path) -> tuple[Document, Row, Row | None]:
    """Returns the newest document that has the line's row, the row, and that of the fastest
    peer.
    """
    for document in reversed(load(records / f"{line.record}.jsonl")):
        alike = [
            row
            for row in document["rows"]
            if all(row.get(field) == value for field, value in line.problem.items())
            and _us(row) is not None
        ]
        ours = [
            row
            for row in alike
            if row["library"] == "kccl"
            and all(row.get(field) == value for field, value in line.ours.items())
        ]
        if ours:
            peers = [row for row in alike if row["library"] != "kccl"]
            return document, min(ours, key=_us), min(peers, key=_us, default=None)
    raise ValueError(f"{records / line.record}.jsonl has no row of {line.what}")


def _us(row: Row) -> Any:
    """Returns the microseconds of a call or a token; None if the row has no time."""
    return row["us_per_token"] if "us_per_token" in row else row["time_us"]


def _peer(best: Row | None, ours_us: float) -> list[str]:
    """Returns three cells: the fastest peer's time, its name, and its time over KCCL's."""
    if best is None:
        return ["", "none", ""]
    name = str(best["library"])
    return [_text(_us(best)), NAMES.get(name, name), f"{_us(best) / ours_us:.2f}"]


def _machine(document: Document) -> str:
    machine = document["machine"]
    gpus = machine.get("gpus")
    if gpus:
        return f"{len(gpus)} {gpus[0].removeprefix('NVIDIA ')}"
    cpu = "Intel Xeon" if "Intel" in machine["cpu_model"] else machine["cpu_model"]
    return f"{machine['allowed_cpus']} cores, {cpu}"


def _text(us: float) -> str:
    return f"{us:.3f}" if us < 10 else f"{us:,.1f}" if us < 100 else f"{us:,.0f}"
