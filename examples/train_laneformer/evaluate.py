"""Measures a trained model on the held-out files, and writes its card.

    python examples/train_laneformer/evaluate.py --data corpus --model laneformer/model

Bits per byte of all held-out files, the tokens that end them included. Beside it, of the same
bytes: `xz -9` of all files in a row, the same behind 56 MB of the training files (which its
window of 64 MiB sees whole; the difference of both sizes counts), and a 5-gram model of the same
training tokens (ngram.py).

Completions: --completions times a held-out file is cut at the end of a line, the model goes on for
64 tokens, and from there to the first end of a line, or of the file, at which the whole text, from
the file's first line to the last new one, parses (`ast.parse`). Nothing that the model wrote is
left out. It fails if there is no such line within 320 tokens. kccl.engine runs the model if it is
installed, and else the PyTorch module: the card says which.

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

PRIMED_BYTES = 56_000_000
LEAST_TOKENS, MOST_TOKENS = 64, 320


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
    """What the files in a row of tokens take, each alone: every token but the END_ID before it, and
    the one behind it.
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
    """Bits of `xz -9` of the held-out bytes, alone and behind the training bytes."""
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


def closed(before: str, pieces: list[str], is_ended: bool) -> str | None:
    """The completion up to the first line's end, behind LEAST_TOKENS, at which all parses; None if
    there is none. `pieces` are the tokens' texts; is_ended: the model ended the file behind them.
    """
    text = "".join(pieces)
    lengths = [0, *accumulate(map(len, pieces))]
    least = lengths[min(LEAST_TOKENS, len(pieces))]
    ends = [i + 1 for i in range(len(text)) if text[i] == "\n" and i + 1 >= least]
    if is_ended:
        ends.append(len(text))
    return next((text[:end] for end in ends if parses(before + text[:end])), None)


def cuts(texts: list[str], number: int, seed: int) -> list[tuple[str, str]]:
    """Held-out files in two parts, cut behind a line that is not the last: files and lines are
    drawn evenly, and no cut twice.
    """
    rng = np.random.default_rng(seed)
    found: dict[tuple[int, int], tuple[str, str]] = {}
    for _ in range(100 * number):
        if len(found) == number:
            break
        file = int(rng.integers(len(texts)))
        lines = texts[file].splitlines(keepends=True)
        line = int(rng.integers(1, max(len(lines), 2)))
        if line < len(lines):
            found[file, line] = "".join(lines[:line]), "".join(lines[line:])
    return list(found.values())


class ModuleGenerator:
    """Completes by the PyTorch module, without a cache. Takes the tokens' most likely."""

    name = "the PyTorch module"

    def __init__(self, folder: Path, device: str) -> None:
        self.module, self.device = load(folder).to(device), device
        self.backend = Tokenizer.from_file(str(folder / "tokenizer.json"))

    @torch.no_grad()
    def __call__(self, ids: list[int], temperature: float, seed: int) -> list[int]:
        generator = torch.Generator(self.device).manual_seed(seed)
        new: list[int] = []
        while len(new) < MOST_TOKENS and END_ID not in new:
            logits = self.module(torch.tensor([ids + new], device=self.device))[0, -1].float()
            if temperature:
                shares = functional.softmax(logits / temperature, -1)
                new.append(int(torch.multinomial(shares, 1, generator=generator)))
            else:
                new.append(int(logits.argmax()))
        return new


class EngineGenerator:
    """Completes by kccl.engine."""

    name = "kccl.engine"

    def __init__(self, folder: Path) -> None:
        from kccl.engine import Engine

        self.engine = Engine(folder)

    def __call__(self, ids: list[int], temperature: float, seed: int) -> list[int]:
        chosen = {"temperature": temperature, "seed": seed, "max_tokens": MOST_TOKENS}
        return self.engine.generate(ids, stop_ids=(END_ID,), **chosen).ids


def make_generator(folder: Path, device: str):
    try:
        return EngineGenerator(folder)
    except ImportError as error:
        print(f"kccl.engine cannot be imported ({error}): completing by the PyTorch module")
        return ModuleGenerator(folder, device)


def complete(generate, tokenizer, context: int, cut: str, temperature: float, seed: int) -> dict:
    """One completion: what the model wrote, and what of it is closed."""
    ids = [END_ID, *tokenizer.encode(cut).ids][-(context - MOST_TOKENS) :]
    new = generate(ids, temperature, seed)
    is_ended = END_ID in new
    new = new[: new.index(END_ID)] if is_ended else new
    # A piece at a time, so that a character of several tokens counts with its last.
    whole = [tokenizer.decode(new[:count]).rstrip("\ufffd") for count in range(len(new) + 1)]
    pieces = [after[len(before) :] for before, after in pairwise(whole)]
    return {"before": cut[-500:], "wrote": whole[-1], "closed": closed(cut, pieces, is_ended)}


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
    generate = make_generator(options.model, options.device)
    result["completed by"] = generate.name
    context = module.config["max_position_embeddings"]
    completions = {}
    for temperature in (0.0, 0.8):
        found = [
            complete(generate, tokenizer, context, before, temperature, options.seed + index)
            for index, (before, _) in enumerate(cuts(texts, options.completions, options.seed))
        ]
        completions[f"{temperature:g}"] = found
        share = sum(each["closed"] is not None for each in found) / len(found)
        result[f"parse at temperature {temperature:g}"] = {"of": len(found), "share": share}
        print(f"temperature {temperature:g}: {100 * share:.1f} % of {len(found)} parse", flush=True)
    write_json(options.model / "evaluation.json", result)
    write_json(options.model.parent / "completions.json", completions)
    card.write(options.model, corpus)


if __name__ == "__main__":
    main()
