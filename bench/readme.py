"""Write READMEs' tables from the records: `python -m kccl.bench.readme README.md bench/README.md`.

A table is between `<!-- record FILE COLLECTIVE -->` and `<!-- end -->`. It shows the newest
document of bench/records/FILE that has rows of the collective.
`<!-- record FILE COLLECTIVE headline -->` shows KCCL and the best peer at twelve sizes at most.
`<!-- record FILE in_kernel -->` shows the calls inside kernels, of each collective from its newest
document. `<!-- record FILE decode -->` shows how fast the engine decodes, `<!-- record FILE
ablation -->` what its parts cost, `<!-- record FILE accuracy -->` how far its ops are from the
reference. `<!-- summary -->` is README's one table (summary.py). `--check` changes nothing and
prints whether the tables are up to date.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from math import ceil
from pathlib import Path

from . import summary
from .decode import accuracy, variants
from .decode import report as decode_report
from .harness.document import Document, load
from .harness.measure import Row
from .harness.report import best_peer

RECORDS = Path(__file__).parent / "records"
_TABLE = re.compile(r"(<!-- record (\S+) (\S+)( headline)? -->\n).*?(<!-- end -->)", re.DOTALL)
_SUMMARY = re.compile(r"(<!-- summary -->\n).*?(<!-- end -->)", re.DOTALL)
_HEAD = (
    "| bytes | from C | `op()` | `comm.{collective}(x)` | best MPI | MPI / `op()` | floor |\n"
    "|---:|---:|---:|---:|---:|---:|---:|\n"
)


# Column -> (library, algorithm). With None it shows the fastest of the library's algorithms.
_PEERS_ON_GPUS = {
    "NCCL": ("nccl", "default"),
    "NCCL, window": ("nccl", "symmetric_window"),
    "PyTorch": ("torch_symm_mem", None),
    "FlashInfer": ("flashinfer", None),
    "NVSHMEM": ("nvshmem", None),
}

_IN_KERNEL = "in_kernel"
_MOST_HEADLINES = 12
# The sizes that the tables show. Records have more.
_SIZES_IN_KERNELS = (16, 1024, 2048, 8192, 65536)
_HEAD_IN_KERNELS = (
    "| inside a kernel | by | ranks | bytes | complete | order | blocks | us | p99 | skewed "
    "| floor | us / floor | peer |\n"
    "|---|---|---:|---:|---|---|---:|---:|---:|---:|---:|---:|---:|\n"
)


def table(document: Document, collective: str) -> str:
    """Returns the rows of a collective as a Markdown table."""
    rows = [row for row in document["rows"] if row["collective"] == collective]
    make = _on_gpus if document["machine"].get("gpus") else _on_the_host
    return make(document, rows, collective)


def headline(document: Document, collective: str) -> str:
    """Returns a table with a line for each size: KCCL, the best peer, their ratio, and the floor.

    KCCL's call is the prepared one, on GPUs in a graph.
    """
    has_gpus = bool(document["machine"].get("gpus"))
    mode, call = ("graph", None) if has_gpus else ("eager", "prepared")
    rows = [
        row
        for row in document["rows"]
        if row["collective"] == collective and row["time_us"] is not None
    ]
    ours = {
        row["bytes"]: row
        for row in rows
        if row["library"] == "kccl" and row["mode"] == mode and call in (None, row["call"])
    }
    sizes = sorted(ours)
    # Takes at most _MOST_HEADLINES sizes, at equal steps down from the largest.
    sizes = sizes[:: -ceil(len(sizes) / _MOST_HEADLINES)][::-1]
    lines = [
        "| bytes | KCCL | best peer | | peer / KCCL | floor |\n|---:|---:|---:|---|---:|---:|\n"
    ]
    for nbytes in sizes:
        row = ours[nbytes]
        peers = [
            each
            for each in rows
            if (each["bytes"], each["mode"]) == (nbytes, mode) and each["library"] != "kccl"
        ]
        best = min(peers, key=lambda each: each["time_us"], default=None)
        cells = [f"{nbytes:,}", _text(row["time_us"]), _text(_time(best))]
        cells.append(summary.NAMES[best["library"]] if best else "")
        cells.append(f"{best['time_us'] / row['time_us']:.2f}" if best else "")
        cells.append(_text(row["floor_us"]))
        lines.append("| " + " | ".join(cells) + " |\n")
    machine = document["machine"]
    where = f"{machine['allowed_cpus']} cores of {machine['cpu_model']}"
    if has_gpus:
        where = f"{len(machine['gpus'])} {machine['gpus'][0]}"
    source = (
        f"\nMicroseconds a call, medians of the slowest of {machine['ranks']} ranks on {where}; "
        f"commit {document['commit']}.\n"
    )
    return "".join(lines) + source


def _on_gpus(document: Document, rows: list[Row], collective: str) -> str:
    """Returns a table of microseconds per call in a CUDA graph, by size, of kccl and its peers."""
    rows = [row for row in rows if row["mode"] == "graph" and row["time_us"] is not None]
    by_peer = {
        column: [
            row
            for row in rows
            if row["library"] == library and algorithm in (row["algorithm"], None)
        ]
        for column, (library, algorithm) in _PEERS_ON_GPUS.items()
    }
    by_peer = {column: found for column, found in by_peer.items() if found}
    columns = ["bytes", "KCCL", "skewed", *by_peer, "best peer / KCCL", "floor"]
    lines = [f"| {' | '.join(columns)} |\n", f"|{'---:|' * len(columns)}\n"]
    for nbytes in sorted({row["bytes"] for row in rows}):
        ours = next(row for row in rows if (row["bytes"], row["library"]) == (nbytes, "kccl"))
        peers = [
            min((row["time_us"] for row in found if row["bytes"] == nbytes), default=None)
            for found in by_peer.values()
        ]
        best = min((us for us in peers if us is not None), default=None)
        cells = [f"{nbytes:,}", *map(_text, (ours["time_us"], ours["skewed_us"], *peers))]
        cells.append(f"{best / ours['time_us']:.2f}" if best else "")
        cells.append(_text(ours["floor_us"]))
        lines.append("| " + " | ".join(cells) + " |\n")
    machine = document["machine"]
    gpus = f"{machine['ranks']} ranks on {len(machine['gpus'])} {machine['gpus'][0]}"
    source = (
        f"\nMicroseconds a call, back to back in a CUDA graph, medians of the slowest of {gpus}; "
        f"commit {document['commit']}.\n"
    )
    return "".join(lines) + source


def in_kernels(documents: Sequence[Document]) -> str:
    """Returns a table of calls inside persistent kernels, with a line for each row of kccl.

    Args:
        documents: The documents. They must all be from one machine.
    """
    lines, commits = [], []
    for document in documents:
        rows = [row for row in document["rows"] if row["time_us"] is not None]
        for row in rows:
            if row["library"] != "kccl":
                continue
            if row["dtype"] and row["bytes"] not in _SIZES_IN_KERNELS:
                continue
            size = f"{row['bytes']:,}" if row["dtype"] else ""
            by = row["algorithm"].removeprefix(f"{row['collective']}_")
            names = [row["collective"], by, str(row["world_size"]), size]
            names += [row["complete"], row["order"], str(row["blocks"])]
            times = (row["time_us"], row["p99_us"], row["skewed_us"], row["floor_us"])
            ratio = f"{row['time_us'] / row['floor_us']:.2f}" if row["floor_us"] else ""
            cells = [*names, *map(_text, times), ratio, _text(best_peer(rows, row))]
            lines.append("| " + " | ".join(cells) + " |\n")
        commits.append(document["commit"])
    machine = documents[0]["machine"]
    commits = list(dict.fromkeys(commits))
    source = (
        f"\nMicroseconds, medians of the slowest of {machine['ranks']} ranks on "
        f"{len(machine['gpus'])} {machine['gpus'][0]}; commit {', '.join(commits)}.\n"
    )
    return _HEAD_IN_KERNELS + "".join(lines) + source


def _on_the_host(document: Document, rows: list[Row], collective: str) -> str:
    """Returns a table by size: KCCL in three forms, the best MPI, their ratio, and the floor."""
    lines = []
    for nbytes in sorted({row["bytes"] for row in rows}):
        here = [row for row in rows if row["bytes"] == nbytes and row["time_us"] is not None]
        ours = {(row["mode"], row["call"]): row for row in here if row["library"] == "kccl"}
        peers = [row for row in here if row["library"] != "kccl"]
        prepared = _time(ours.get(("eager", "prepared")))
        best = min(peers, key=lambda row: row["time_us"], default=None)
        ratio = f"{best['time_us'] / prepared:.1f}" if best and prepared else ""
        floors = [row["floor_us"] for row in here if row["floor_us"] is not None]
        cells = [
            f"{nbytes:,}",
            _text(_time(next((row for key, row in ours.items() if key[0] == "host"), None))),
            _text(prepared),
            _text(_time(ours.get(("eager", "direct")))),
            f"{_text(_time(best))} {best['library']}" if best else "",
            ratio,
            _text(min(floors, default=None)),
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    machine = document["machine"]
    source = (
        f"\nMicroseconds, medians of the slowest of {machine['ranks']} ranks on "
        f"{machine['allowed_cpus']} cores of {machine['cpu_model']}; commit {document['commit']}.\n"
    )
    return _HEAD.format(collective=collective) + "".join(lines) + source


def _time(row: Row | None) -> float | None:
    return None if row is None else row["time_us"]


def _text(us: float | None) -> str:
    return "" if us is None else f"{us:.3f}" if us < 10 else f"{us:,.1f}"


_OF_ENGINE = {
    "decode": decode_report.markdown,
    "ablation": variants.markdown,
    "accuracy": accuracy.markdown,
}


def update(text: str, records: Path = RECORDS) -> str:
    """Returns `text` with every table written anew from its record.

    Raises:
        ValueError: A table names a record that does not exist or has no such rows.
    """

    def replace(match: re.Match[str]) -> str:
        begin, name, what, is_headline, end = match.groups()
        if what in _OF_ENGINE:
            return begin + _OF_ENGINE[what](load(records / name)) + end
        newest: dict[tuple[bool, str], Document] = {}
        for document in load(records / name):
            for row in document["rows"]:
                newest[row["mode"] == _IN_KERNEL, row["collective"]] = document
        if what == _IN_KERNEL:
            documents = [newest[key] for key in newest if key[0]]
        else:
            documents = [newest[key] for key in newest if key == (False, what)]
        if not documents:
            raise ValueError(f"{records / name} has no rows of {what}")
        if is_headline:
            return begin + headline(documents[0], what) + end
        made = in_kernels(documents) if what == _IN_KERNEL else table(documents[0], what)
        return begin + made + end

    text = _TABLE.sub(replace, text)
    return _SUMMARY.sub(lambda match: match[1] + summary.table(records) + match[2], text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kccl.bench.readme",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("readme", type=Path, nargs="+", help="files with tables to update")
    parser.add_argument("--check", action="store_true", help="change nothing, say what is stale")
    args = parser.parse_args(argv)
    are_stale = False
    for path in args.readme:
        old = path.read_text()
        new = update(old)
        if not args.check:
            path.write_text(new)
            continue
        print(f"{path} is up to date" if new == old else f"{path} is older than its records")
        are_stale |= new != old
    return int(are_stale)


if __name__ == "__main__":
    sys.exit(main())
