"""The model's card and data card: README.md in its folder."""

import json
from pathlib import Path

_TEXT = """---
license: apache-2.0
language: code
pipeline_tag: text-generation
tags: [laneformer, python]
---
# laneformer-python

A Laneformer of {num_weights:,} weights that continues Python source, trained by
`examples/train_laneformer`. It shows the architecture, and is no assistant: it knows the style of
Python and of common libraries, and invents names, facts and results.

{shape} {trained}

```sh
kccl generate --model . --prompt "def mean(values):" --max-tokens 60
```

End a prompt without a line break: the tokenizer joins it with the indentation that follows.

## Measured
{measured}

## Data
{counts}

Only packages whose metadata name permissive licences alone were used, without their tests, copies
of other packages, generated tables and near-duplicates (`corpus.py` says how). A file's path
decides whether it is held out. What the model writes may repeat lines of these packages.

| package | version | licences | files | bytes |
|---|---|---|---:|---:|
{packages}
"""


def write(folder: Path, corpus: dict) -> None:
    """Writes README.md by config.json, training.json, what corpus.json says and, if there is one,
    evaluation.json.
    """
    config = json.loads((folder / "config.json").read_text())
    evaluation = folder / "evaluation.json"
    measured = json.loads(evaluation.read_text()) if evaluation.exists() else None
    taken = [row for row in corpus["packages"] if row["files"]]
    rows = [
        f"| {row['name']} | {row['version']} | {', '.join(row['licences'])} | {row['files']:,} | "
        f"{row['bytes']:,} |"
        for row in sorted(taken, key=lambda row: -row["bytes"])
    ]
    counts = [
        f"{part['files']:,} files, {part['bytes']:,} bytes, {part['tokens']:,} tokens {what}"
        for part, what in ((corpus["train"], "for training"), (corpus["heldout"], "held out"))
    ]
    text = _TEXT.format(
        num_weights=num_weights(config),
        shape=shape(config),
        trained=trained(json.loads((folder / "training.json").read_text())),
        measured=figures(measured) if measured else "Not yet: `evaluate.py` does.",
        counts="; ".join(counts) + ".",
        packages="\n".join(rows),
    )
    (folder / "README.md").write_text(text)


def num_weights(c: dict) -> int:
    width, heads = c["hidden_size"], c["num_attention_heads"] + c["num_key_value_heads"]
    layer = 2 * heads * c["head_dim"] * width + 3 * width * c["intermediate_size"] + 2 * width
    return c["num_hidden_layers"] * layer + (2 * c["vocab_size"] + 1) * width


def shape(c: dict) -> str:
    return (
        f"{c['num_hidden_layers']} layers of {c['num_lanes']} lanes; messages land after "
        f"{c['broadcast_delay']} layers. Width {c['hidden_size']}, MLP {c['intermediate_size']}, "
        f"{c['num_attention_heads']} query and {c['num_key_value_heads']} KV heads of "
        f"{c['head_dim']}, {c['vocab_size']:,} tokens of byte-level BPE, context "
        f"{c['max_position_embeddings']:,}."
    )


def trained(run: dict) -> str:
    sittings = [f"{each['seconds']} s on {each['device']}" for each in run["sittings"]]
    return (
        f"Trained for {run['step']:,} steps of {run['tokens_per_step']:,} tokens, "
        f"{' and '.join(sittings)}; seed {run['seed']}."
    )


def figures(result: dict) -> str:
    """The figures of evaluation.json; `evaluate.py` explains the terms in its head."""
    names = ("model", "5-gram", "xz -9", "xz -9, primed")
    lines = [f"Of {result['files']:,} held-out files, {result['bytes']:,} bytes:", ""]
    lines += ["| | bits per byte |", "|---|---:|"]
    lines += [f"| {name} | {result[name]:.3f} |" for name in names]
    lines.append("")
    lines += [
        f"- {name.removeprefix('parse: ').capitalize()}: {100 * found['share']:.1f} % of "
        f"{found['of']} completions parse, closed at the end of a line."
        for name, found in result.items()
        if name.startswith("parse: ")
    ]
    lines.append("- `evaluate.py` defines all terms.")
    return "\n".join(lines)
