"""How far each kind of op is from the reference: `python -m kccl.bench.decode.accuracy MODEL ...`.

Runs the NumPy reference and the engine over the same tokens, and compares the output of every op.
An op's error contains the errors of all ops before it. With `--json` the last line is a document
for bench/records/. The exit code is 1 if an op's error is above its limit in engine/diff.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path

import numpy as np

import kccl
from kccl.engine import Engine
from kccl.engine.diff import LIMITS, Diff
from kccl.engine.executors.opening import BACKENDS
from kccl.engine.files.checkpoint import Checkpoint, open_checkpoint
from kccl.engine.files.models import find_model
from kccl.engine.files.random_weights import MODELS, random_checkpoint

from ..harness.document import Document, document, machine
from ..harness.measure import Row
from .report import MODEL_NAMES

_HEAD = (
    "| model | ranks | tokens | op | ops | relative RMSE | limit | 1 - cosine | limit |\n"
    "|---|---:|---:|---|---:|---:|---:|---:|---:|\n"
)


def rows_of(name: str, checkpoint: Checkpoint, engine: Engine, ids: Sequence[int]) -> list[Row]:
    """Returns a row for each kind of op, with the errors of its worst op.

    Args:
        name: The model's name in rows.
        checkpoint: The model.
        engine: An engine that has opened the model. Its ranks must be threads.
        ids: The tokens to run.
    """
    kinds = list(LIMITS)
    found = sorted(Diff(checkpoint, engine, ids).all(), key=lambda each: kinds.index(each.op.kind))
    rows = []
    for kind, each in groupby(found, key=lambda each: each.op.kind):
        ops = list(each)
        rows.append(
            {
                "library": "kccl",
                "model": name,
                "backend": engine.backend,
                "world_size": engine.world_size,
                "dtype": engine.dtype,
                "tokens": len(ids),
                "op_kind": kind,
                "ops": len(ops),
                "rmse": max(op.rmse for op in ops),
                "rmse_limit": LIMITS[kind].rmse,
                "cosine": min(op.cosine for op in ops),
                "cosine_limit": LIMITS[kind].cosine,
                "is_within": all(op.is_within(None) for op in ops),
            }
        )
    return rows


def markdown(documents: Sequence[Document]) -> str:
    """Returns a Markdown table of the newest row of each model, number of ranks and kind of op."""
    newest = {
        (row["model"], row["world_size"], row["op_kind"]): (document, row)
        for document in documents
        for row in document["rows"]
        if "op_kind" in row
    }
    if not newest:
        raise ValueError("there are no rows of accuracy")
    lines = []
    for _, row in newest.values():
        cells = [
            MODEL_NAMES.get(row["model"], row["model"]),
            *(f"{row[field]:,}" for field in ("world_size", "tokens")),
            str(row["op_kind"]),
            str(row["ops"]),
            *(f"{row[field]:.2g}" for field in ("rmse", "rmse_limit")),
            *(f"{1 - row[field]:.1g}" for field in ("cosine", "cosine_limit")),
        ]
        lines.append("| " + " | ".join(cells) + " |\n")
    made = [document for document, _ in newest.values()]
    gpus = made[0]["machine"].get("gpus")
    where = gpus[0] if gpus else made[0]["machine"]["cpu_model"]
    commits = ", ".join({str(document["commit"]): None for document in made})
    return _HEAD + "".join(lines) + f"\nThe worst op of each kind, {where}; commit {commits}.\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns the exit code: 1 if an op is beyond its limit, 2 on errors."""
    parser = argparse.ArgumentParser(
        prog="python -m kccl.bench.decode.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model", nargs="+", help=f"as of kccl generate, or random weights: {', '.join(MODELS)}"
    )
    parser.add_argument("--executor", default="host", choices=BACKENDS, help="what runs it (host)")
    parser.add_argument("-n", "--ranks", type=int, default=1, help="ranks as threads (1)")
    parser.add_argument("--tokens", type=int, default=64, help="how many random ones (64)")
    parser.add_argument("--json", action="store_true", help="end with one JSON document")
    args = parser.parse_args(arguments)
    if args.tokens < 1:
        parser.error(f"--tokens is {args.tokens}, must be at least 1")
    rows: list[Row] = []
    facts = {}
    try:
        for model in args.model:
            with (
                _opened(model) as checkpoint,
                Engine(checkpoint, args.executor, args.ranks, context=args.tokens) as engine,
            ):
                config = checkpoint.config
                ids = np.random.default_rng(0).integers(config.vocab_size, size=args.tokens)
                rows += rows_of(Path(model).name, checkpoint, engine, ids.tolist())
                if any(names := engine.devices()):
                    facts = {"gpus": names}
    except kccl.Error as error:
        sys.stderr.write(f"{error}\n")
        return 2
    command = sys.argv[1:] if arguments is None else list(arguments)
    made = document(rows, machine(args.ranks) | facts, command)
    # document() writes a command of kccl, but this is a module that is run with python -m.
    made["command"] = made["command"].replace("kccl", parser.prog, 1)
    print(markdown([made]), end="")
    if args.json:
        print(json.dumps(made))
    return int(not all(row["is_within"] for row in rows))


def _opened(model: str) -> AbstractContextManager[Checkpoint]:
    return random_checkpoint(model) if model in MODELS else open_checkpoint(find_model(model))


if __name__ == "__main__":
    sys.exit(main())
