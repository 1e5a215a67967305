"""Prints rows of decoding as a table on a terminal, as CSV, and as a table in a README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import kccl

from ..harness.document import Document
from ..harness.lines import Column, Table
from ..harness.measure import Row

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = (
    *("library", "model", "backend", "form", "world_size", "dtype", "drafts"),
    *("prompt_tokens", "new_tokens", "position", "tok_s", "us_per_token", "p99_us", "slowest_us"),
    *("ttft_ms", "ttft_steps", "bandwidth_gbps", "bandwidth_share"),
    *("token_hash", "tokens_match"),
    *("ablated", "whole_us"),
)
"""Fields of a row. bench/README.md explains them."""

MODEL_NAMES = {"smollm2": "SmolLM2-135M", "llama-1b": "Llama-3.2-1B", "qwen3-0.6b": "Qwen3-0.6B"}
MODEL_NAMES |= {"qwen2.5-0.5b": "Qwen2.5-0.5B", "mistral-7b": "Mistral-7B"}
MODEL_NAMES |= {"bundled": "laneformer-python (bundled)", "laneformer-2b": "Laneformer 2B"}
_HEAD = (
    "| model | ranks | position | tok/s | us a token | p99 | share of the bound | best peer, tok/s "
    "| KCCL / peer | first token, steps |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n"
)


def is_ablated(row: Row) -> bool:
    """Tells whether the row is of a kernel with a part left out, so that its time is no speed."""
    return row.get("ablated") is not None


def ours_and_best(rows: Sequence[Row]) -> list[tuple[Row, Row | None]]:
    """Returns KCCL's timed rows without drafts, each with the fastest peer's row of the same run
    and position, or None.
    """
    found = []
    for row in rows:
        if row["library"] != "kccl" or is_ablated(row) or "position" not in row:
            continue
        # With drafts there are fewer passes than tokens, so these are no times of a token step.
        # Rows that are older than drafts do not have the field.
        if row.get("drafts") not in (None, "off"):
            continue
        # Skips rows of interrupted runs, whose tokens were not checked.
        if row["tokens_match"] is None:
            continue
        peers = [
            each
            for each in rows
            if each["library"] != "kccl"
            and each["position"] == row["position"]
            and each["tok_s"] is not None
        ]
        found.append((row, max(peers, key=lambda each: float(each["tok_s"]), default=None)))
    return found


class Screen:
    """Prints the table of a run: a line for each library and position, without ablated kernels."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._table: Table | None = None

    def add(self, rows: Sequence[Row]) -> None:
        """Prints the rows of one position."""
        if self._table is None:
            self._table = Table(_TABLE, self._out.width)
            for line in ("", *self._table.heading()):
                self._out.print(line, soft_wrap=True)
        mine = next(row for row in rows if row["library"] == "kccl" and not is_ablated(row))
        for row in rows:
            if not is_ablated(row):
                style = "bold red" if row["tokens_match"] is False else None
                for line in self._table.lines(_cells(row, mine)):
                    self._out.print(line, style=style, soft_wrap=True)

    def end(self, rows: Sequence[Row]) -> None:
        """Prints what the columns mean, if there are rows."""
        if not rows:
            return
        out = self._out
        kccl.screen.say(
            out, "\n# median of the runs; p99: of single tokens; ratio: KCCL's tok/s / this one's"
        )
        reads = {f"{row['bandwidth_gbps']:.1f}": row["position"] for row in rows}
        kccl.screen.say(
            out,
            "# bound: weights, keys and values of a token at the speed at which the same\n"
            f"#        threads read the weights, in this run: {', '.join(reads)} GB/s",
        )
        length = next(row["prompt_tokens"] for row in rows if not is_ablated(row))
        kccl.screen.say(
            out,
            f"# 1st token: of a prompt of {length} tokens; steps: so many tokens take as long",
        )


_TABLE = (
    Column("position", 8, is_label=True),
    Column("library", 16, is_label=True),
    Column("tok/s", 7),
    Column("us a token", 10, drop=1),
    Column("p99 (us)", 8, drop=2),
    Column("bound", 5, drop=3),
    Column("ratio", 6),
    Column("1st token (ms)", 14, drop=4),
)


def _cells(row: Row, mine: Row) -> dict[str, str]:
    """Returns the cells of a row's line: heading -> text. `mine` is KCCL's row of the position."""
    is_peer = row is not mine
    name = " ".join(filter(None, (row["library"], row["form"])))
    found = {"position": "" if is_peer else str(row["position"])}
    doubts = {False: ": wrong tokens", None: ": unchecked"}
    found["library"] = name + doubts.get(row["tokens_match"], "")
    if is_peer and row["tok_s"] and mine["tok_s"]:
        found["ratio"] = f"{mine['tok_s'] / row['tok_s']:.2f}x"
    fields = {"tok/s": "tok_s", "us a token": "us_per_token", "p99 (us)": "p99_us"}
    found |= {heading: _number(row[field]) for heading, field in fields.items()}
    if row["ttft_ms"] is not None:
        found["1st token (ms)"] = f"{row['ttft_ms']:.0f} = {row['ttft_steps']:.0f} steps"
    return found | {"bound": _percent(row["bandwidth_share"])}


def markdown(documents: Sequence[Document]) -> str:
    """Returns a table of KCCL's rows of each model, format of weights, number of ranks and
    position, from the newest document that has them.
    """
    newest: dict[tuple[str, str, int, int], tuple[Document, Row, Row | None]] = {}
    for document in documents:
        for row, peer in ours_and_best(document["rows"]):
            key = (row["model"], _rounded(row), row["world_size"], row["position"])
            newest[key] = (document, row, peer)
    if not newest:
        raise ValueError("there are no rows of decode")
    lines = []
    for key in sorted(newest):
        _, row, peer = newest[key]
        ratio = f"{row['tok_s'] / peer['tok_s']:.2f}" if peer and row["tok_s"] else ""
        name = str(MODEL_NAMES.get(row["model"], row["model"]))
        cells = [
            ", ".join(filter(None, (name, _rounded(row)))),
            str(row["world_size"]),
            f"{row['position']:,}",
            *(_number(row[field]) for field in ("tok_s", "us_per_token", "p99_us")),
            _percent(row["bandwidth_share"]),
            f"{_number(peer['tok_s'])} {peer['library']}" if peer else "",
            ratio,
            _number(row["ttft_steps"]),
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    return _HEAD + "".join(lines) + source_of([document for document, _, _ in newest.values()])


def _rounded(row: Row) -> str:
    """Returns the format of weights if it has fewer than 16 bits, as "FP8"; else ""."""
    return "" if row["dtype"] in ("bfloat16", "float16") else str(row["dtype"]).upper()


def source_of(documents: Sequence[Document]) -> str:
    """Returns the line under a table: the machine and the commits of its documents."""
    machine = documents[0]["machine"]
    gpus = machine.get("gpus")
    where = f"{machine['allowed_cpus']} cores of {machine['cpu_model']}"
    if gpus:
        where = f"{len(gpus)} x {gpus[0]}"
    commits = ", ".join({str(document["commit"]): None for document in documents})
    return f"\nMedians, {where}; commit {commits}.\n"


def _number(value: float | None) -> str:
    """Returns a number with three significant digits, or all digits of its integer part; "" for
    None.
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"
