"""Measures a trained model on the held-out files, and writes its card.

    python examples/train_laneformer/evaluate.py --data corpus --model laneformer/model

Bits per byte of all held-out files, the tokens that end them included. Beside it, of the same
bytes: `xz -9` of all files in a row, the same after 56 MB of the training files (which its
window of 64 MiB sees whole; the difference of both sizes counts), and a 5-gram model of the same
training tokens (ngram.py).

Completions: --completions times a held-out file is cut at the end of a line, before the line break.
The model goes on for 64 tokens, and from there to the first end of a line, or of the file, at which
the whole text, from the file's first line to the last new one, parses (`ast.parse`). Nothing that
the model wrote is left out. It fails if there is no such line within 320 tokens. A cut counts only
if the file's own next lines pass the same test: inside a table of 400 lines nobody can. Why before
the line break: the tokenizer joins it with the indentation that follows, so a line break of its own
tells the model that an empty line follows. kccl.engine runs the model.

Writes evaluation.json and README.md into the model's folder, and beside the folder what the model
wrote, completions.json.
"""

import argparse
import ast
import json
import lzma
import warnings
from itertools import accumulate, pairwise
from pathlib import Path

import card
import numpy as np
import torch
from corpus import END_ID, decode
from laneformer import load, write_json
from ngram import NgramModel
from tokenizers import Tokenizer
from torch.nn import functional

from kccl.engine import Engine

PRIMED_BYTES = 56_000_000
LEAST_TOKENS, MOST_TOKENS = 64, 320
# How tokens are chosen, by the name under which evaluation.json has the result.
CHOICES: dict[str, dict[str, float]] = {
    "the most likely tokens": {"temperature": 0.0},
    "temperature 0.6, top-p 0.9": {"temperature": 0.6, "top_p": 0.9},
}


def windows(tokens: np.ndarray, length: int) -> list[tuple[int, int, int]]:
    """(start, stop, first scored) of windows of at most length + 1 tokens that score each token of
    a row but its first once, with at least half a window before it if the row has it.
    """
    half = length // 2
    found = [(0, min(length + 1, len(tokens)), 1)]
    while found[-1][1] < len(tokens):
        stop = found[-1][1]
        found.append((stop - half, min(stop + length + 1 - half, len(tokens)), stop))
    return found


@torch.no_grad()
def bits(module, tokens: np.ndarray, device: str, sequences: int = 8) -> float:
    """Bits that the model needs for a row of files, each predicted alone.

    Counts a file's tokens and the END_ID after them, not the END_ID before them.
    """
    length = module.config["max_position_embeddings"]
    starts = np.flatnonzero(tokens == END_ID)
    files = [np.append(file, np.uint16(END_ID)) for file in np.split(tokens, starts)[1:]]
    parts = [
        (file[start:stop].astype(np.int64), first - start)
        for file in files
        for start, stop, first in windows(file, length)
    ]
    parts.sort(key=lambda part: len(part[0]))
    total = 0.0
    for index in range(0, len(parts), sequences):
        batch = parts[index : index + sequences]
        longest = len(batch[-1][0])
        ids = np.zeros((len(batch), longest), np.int64)
        is_scored = np.zeros((len(batch), longest), bool)
        for row, (window, first) in enumerate(batch):
            ids[row, : len(window)] = window
            is_scored[row, first : len(window)] = True
        ids = torch.from_numpy(ids).to(device)
        logits = module(ids[:, :-1]).float().flatten(0, 1)
        each = functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        total += each[torch.from_numpy(is_scored[:, 1:].flatten()).to(device)].double().sum().item()
    return total / np.log(2)


def xz_bits(held_out: bytes, training: bytes) -> tuple[int, int]:
    """Bits of `xz -9` of the held-out bytes, alone and after the training bytes."""
    alone, before, both = (
        8 * len(lzma.compress(data, preset=9)) for data in (held_out, training, training + held_out)
    )
    return alone, both - before


def parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The tokens' texts. That of a character of several tokens belongs to the last of them."""
    whole = [tokenizer.decode(ids[:count]).rstrip("\ufffd") for count in range(len(ids) + 1)]
    return [after[len(before) :] for before, after in pairwise(whole)]


def closed(before: str, pieces: list[str], is_ended: bool) -> str | None:
    """The completion up to the first end of a line, after LEAST_TOKENS, at which all parses.

    Args:
        before: The text before the completion.
        pieces: The texts of the completion's tokens.
        is_ended: The file ends after them.

    Returns:
        None if there is no such line.
    """
    text = "".join(pieces)
    lengths = [0, *accumulate(map(len, pieces))]
    least = lengths[min(LEAST_TOKENS, len(pieces))]
    ends = [i + 1 for i in range(len(text)) if text[i] == "\n" and i + 1 >= least]
    if is_ended:
        ends.append(len(text))
    return next((text[:end] for end in ends if parses(before + text[:end])), None)


def cuts(texts: list[str], number: int, seed: int, tokenizer: Tokenizer) -> list[str]:
    """Beginnings of held-out files, each up to the end of a line that is not the last, without its
    line break. Files and lines are drawn evenly, and no cut twice; the head says which cuts count.
    """
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, int], str] = {}
    for _ in range(100 * number):
        if len(found) == number:
            break
        file = int(rng.integers(len(texts)))
        lines = texts[file].splitlines(keepends=True)
        line = int(rng.integers(1, max(len(lines), 2)))
        if line < len(lines) and (file, line) not in found:
            before = "".join(lines[:line]).removesuffix("\n")
            after = tokenizer.encode(texts[file][len(before) :]).ids
            pieces = pieces_of(tokenizer, after[:MOST_TOKENS])
            if closed(before, pieces, is_ended=len(after) < MOST_TOKENS) is not None:
                found[file, line] = before
    return list(found.values())


def complete(engine: Engine, tokenizer: Tokenizer, before: str, seed: int, choice: dict) -> dict:
    """One completion: what the model wrote, and what of it is closed."""
    ids = [END_ID, *tokenizer.encode(before).ids][-(engine.config.context - MOST_TOKENS) :]
    answer = engine.generate(ids, stop_ids=(END_ID,), max_tokens=MOST_TOKENS, seed=seed, **choice)
    is_ended = END_ID in answer.ids
    pieces = pieces_of(tokenizer, answer.ids[:-1] if is_ended else answer.ids)
    wrote = {"before": before[-500:], "wrote": "".join(pieces)}
    return wrote | {"closed": closed(before, pieces, is_ended)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path("corpus"))
    parser.add_argument("--model", type=Path, default=Path("laneformer/model"))
    parser.add_argument("--completions", type=int, default=200)
    parser.add_argument("--files", type=int, help="of those held out, the first so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    corpus = json.loads((options.data / "corpus.json").read_text())
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    module = load(options.model).to(options.device)
    training = np.fromfile(options.data / "train.bin", np.uint16)
    held_out = np.fromfile(options.data / "heldout.bin", np.uint16)
    if options.files is not None:
        held_out = held_out[
            : np.append(np.flatnonzero(held_out == END_ID), len(held_out))[options.files]
        ]
    texts = decode(tokenizer, held_out)
    held_bytes = "".join(texts).encode()
    result = {"files": len(texts), "bytes": len(held_bytes), "tokens": len(held_out)}

    def record(name: str, bits: float) -> None:
        result[name] = round(bits / len(held_bytes), 4)
        print(f"{name}: {result[name]} bits per byte", flush=True)

    record("model", bits(module, held_out, options.device))
    record("5-gram", NgramModel(training, corpus["vocab_size"]).bits(held_out))
    primer = "".join(decode(tokenizer, training[-PRIMED_BYTES // 2 :])).encode()[-PRIMED_BYTES:]
    alone, primed = xz_bits(held_bytes, primer)
    record("xz -9", alone)
    record("xz -9, primed", primed)
    completions = {}
    with Engine(options.model) as engine:
        befores = cuts(texts, options.completions, options.seed, tokenizer)
        for name, choice in CHOICES.items():
            completions[name] = found = [
                complete(engine, tokenizer, before, options.seed + index, choice)
                for index, before in enumerate(befores)
            ]
            share = sum(each["closed"] is not None for each in found) / len(found)
            result[f"parse: {name}"] = {"of": len(found), "share": share}
            print(f"{name}: {100 * share:.1f} % of {len(found)} parse", flush=True)
    write_json(options.model / "evaluation.json", result)
    write_json(options.model.parent / "completions.json", completions)
    card.write(options.model, corpus)


if __name__ == "__main__":
    main()
