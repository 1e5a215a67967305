"""Measures what parts of a token cost: times kernels with a part left out beside the whole one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import kccl
from kccl.engine import Engine
from kccl.engine.model.variant import USUAL, Variant, parse

from ..harness.document import Document
from ..harness.measure import Row
from .report import MODEL_NAMES, is_ablated, source_of
from .runs import Runs

if TYPE_CHECKING:
    from rich.console import Console

_HEAD = (
    "| model | ranks | position | left out or changed | us a token | whole kernel | difference |\n"
    "|---|---:|---:|---|---:|---:|---:|\n"
)


def variants_of(given: Sequence[str]) -> list[Variant]:
    """Returns the variants that `--ablate` arguments name, each a list with commas. Leaves out the
    whole kernel, which is always measured.

    Raises:
        InvalidArgument: There is no such variant.
    """
    found = {name: parse(name) for each in given for name in each.split(",")}
    return [variant for variant in found.values() if variant != USUAL]


def time_variants(
    engine: Engine, prompt: list[int], num: int, variants: Sequence[Variant], repeats: int
) -> list[Row]:
    """Times each variant beside the whole kernel, in turn, and in reversed order every second time.
    Collective.

    Args:
        engine: An engine with the prompt in its KV cache.
        prompt: The ids of the prompt.
        num: Tokens of a run.
        variants: The variants to time.
        repeats: Number of runs of each variant.

    Returns:
        For each variant: its name as "ablated", its times, and as "whole_us" the whole kernel's.
    """
    order = [USUAL, *variants]
    runs = {variant.name: Runs() for variant in order}
    for repeat in range(repeats):
        for variant in order[:: -1 if repeat % 2 else 1]:
            with engine.using(variant):
                tokens, times = engine.timed(prompt, num + 1)
            # The prompt's pass makes the first token, so it is not timed.
            runs[variant.name].add(tokens, times[1:])
    whole_us = runs[USUAL.name].figures()["us_per_token"]
    return [
        # tok_s is None, because the tokens of an ablated kernel are no answer.
        runs[variant.name].figures()
        | {"tok_s": None, "ablated": variant.name, "whole_us": whole_us}
        for variant in variants
    ]


def print_variants(out: Console, rows: Sequence[Row]) -> None:
    """Prints a line for each variant and position: the microseconds of a token by this kernel and
    by the whole one, and how much more the whole one takes.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for name in ("position", "left out or changed"):
        table.add_column(name)
    for name in ("us a token", "whole kernel", "difference"):
        table.add_column(name, justify="right")
    for row in rows:
        us, whole_us = row["us_per_token"], row["whole_us"]
        is_known = whole_us is not None
        table.add_row(
            str(row["position"]),
            row["ablated"],
            f"{us:,.1f}",
            f"{whole_us:,.1f}" if is_known else "wrong tokens",
            f"{whole_us - us:+,.1f}" if is_known else "",
        )
    out.print(table)
    kccl.screen.say(
        out,
        "# Kernels that leave something out: their tokens are wrong and not checked, so these are "
        "no speeds.\n# difference: what the whole kernel takes more, in turns with them. Parts "
        "overlap, so differences need not add up.",
    )


def markdown(documents: Sequence[Document]) -> str:
    """Returns a table of each model's variants, from the newest document that has them.

    Raises:
        ValueError: No document has a kernel that left something out.
    """
    newest = {
        (row["model"], row["world_size"], row["position"]): document
        for document in documents
        for row in document["rows"]
        if is_ablated(row)
    }
    if not newest:
        raise ValueError("there are no rows of kernels that leave something out")
    lines = []
    for key, document in sorted(newest.items()):
        for row in document["rows"]:
            if not is_ablated(row) or key != (row["model"], row["world_size"], row["position"]):
                continue
            us, whole_us = row["us_per_token"], row["whole_us"]
            name = MODEL_NAMES.get(row["model"], row["model"])
            lines.append(
                f"| {name} | {row['world_size']} | {row['position']:,} | {row['ablated']} "
                f"| {us:,.0f} | {whole_us:,.0f} | {whole_us - us:+,.0f} |\n"
            )
    return _HEAD + "".join(lines) + source_of(list(newest.values()))
