"""Makes the table of README: a line for each call or token, from the newest record that has it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .decode.report import MODEL_NAMES
from .harness.document import Document, load
from .harness.measure import Row

_HOST, _TWO_GPUS = "intel-xeon-2-cores_2", "nvidia-h200_2_make_gpu"
_ONE_SIDED, _HOST_DECODE = "amd-epyc-2-cores_2", "amd-epyc-2-cores_decode"
_GPU_DECODE, _DRAFTS = "nvidia-h200_1_decode", "nvidia-h200_1_drafts_parts"
_WITHOUT_DRAFTS = "kccl without drafts"
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
    _WITHOUT_DRAFTS: "KCCL without drafts",
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


def _decode(
    record: str, model: str, ranks: int, position: int, dtype: str = "bfloat16", form: str = ""
) -> Line:
    problem = {"model": model, "world_size": ranks, "position": position, "dtype": dtype}
    what = f"one token of {MODEL_NAMES.get(model, model)}{form}"
    return Line(record, what, problem, {"ablated": None})


LINES = (
    _in_a_graph("all_reduce", 8 << 10),
    _in_a_graph("all_reduce", 1 << 20),
    _in_a_graph("all_gather", 64 << 10),
    Line(
        _TWO_GPUS,
        "all_reduce within a kernel",
        {"collective": "all_reduce", "mode": "in_kernel", "bytes": 8 << 10, "complete": "slice"},
        {},
    ),
    _decode("nvidia-h200_2_decode", "laneformer-2b", 2, 512),
    _decode(_GPU_DECODE, "llama-1b", 1, 512, "fp8", ", FP8"),
    _decode("nvidia-h200_1_gpt_oss", "gpt-oss-120b", 1, 512),
    Line(
        _DRAFTS,
        "one token of the bundled model, lossless drafts",
        {"model": "bundled", "how": "greedy"},
        {"drafts": "3"},
    ),
    _prepared(_HOST, "all_reduce", "all_reduce", 8),
    _prepared(_HOST, "broadcast", "broadcast", 128 << 10),
    _prepared(_ONE_SIDED, "halo exchange by put", "put", 1 << 10),
    _decode(_HOST_DECODE, "llama-1b", 1, 128),
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
    told = f"Microseconds, medians; with drafts a mean. Commits: {sources}."
    return _HEAD + "".join(lines) + f"\n{told}\n"


def _find(line: Line, records: Path) -> tuple[Document, Row, Row | None]:
    """Returns the newest document that has the line's row, the row, and that of the fastest
    peer.
    """
    for document in reversed(_documents(line.record, records)):
        alike = [
            row
            for row in document["rows"]
            if all(row.get(field) == value for field, value in line.problem.items())
            and _us(row) is not None
        ]
        ours = [
            row
            for row in alike
            if _library(row) == "kccl"
            and all(row.get(field) == value for field, value in line.ours.items())
        ]
        if ours:
            peers = [row for row in alike if _library(row) != "kccl"]
            return document, min(ours, key=_us), min(peers, key=_us, default=None)
    raise ValueError(f"{records / line.record} has no row of {line.what}")


def _documents(record: str, records: Path) -> list[Document]:
    """Returns a record's documents, oldest first. A file .json has one of a driver of its own."""
    path = records / f"{record}.jsonl"
    if path.exists():
        return load(path)
    found: Document = json.loads(path.with_suffix(".json").read_text())
    return [found]


def _library(row: Row) -> str:
    """Returns a row's library. A row of bench/drafts.py has none."""
    without = _WITHOUT_DRAFTS if row.get("drafts") == "off" else "kccl"
    return str(row.get("library", without))


def _us(row: Row) -> Any:
    """Returns the microseconds of a call or a token; None if the row has no time."""
    names = ("us_per_token", "median_us", "us", "time_us")
    return next((row[name] for name in names if name in row), None)


def _peer(best: Row | None, ours_us: float) -> list[str]:
    """Returns three cells: the fastest peer's time, its name, and its time over KCCL's."""
    if best is None:
        return ["", "none", ""]
    name = _library(best)
    return [_text(_us(best)), NAMES.get(name, name), f"{_us(best) / ours_us:.2f}"]


def _machine(document: Document) -> str:
    machine = document["machine"]
    if isinstance(machine, str):
        return machine.replace("NVIDIA ", "")
    gpus = machine.get("gpus")
    if gpus:
        return f"{len(gpus)} {gpus[0].removeprefix('NVIDIA ')}"
    cpu = "Intel Xeon" if "Intel" in machine["cpu_model"] else machine["cpu_model"]
    return f"{machine['allowed_cpus']} cores, {cpu}"


def _text(us: float) -> str:
    return f"{us:.3f}" if us < 10 else f"{us:,.1f}" if us < 100 else f"{us:,.0f}"
