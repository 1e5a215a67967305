"""Makes the corpus: Python source that is installed with KCCL, as tokens.

    python examples/train_laneformer/corpus.py --out corpus

Sources: the standard library of the running interpreter, and those packages of pyproject.toml (all
extras, with what they depend on) that are installed and whose metadata name only licences of
PERMISSIVE. Files that are tests, generated tables, no valid Python, or near-duplicates of a file
before them are left out. A file's path decides whether it is held out. So the same versions of the
packages give the same corpus, byte for byte.

Writes tokenizer.json, train.bin and heldout.bin (uint16 tokens; each file begins with token 0) and
corpus.json (packages, versions, licences, counts).
"""

import argparse
import ast
import hashlib
import json
import platform
import re
import sysconfig
import tomllib
import warnings
from collections import Counter
from importlib import metadata
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
# Begins each file, and so ends the one before it.
END = "<|file|>"
END_ID = 0
# Why so few: embedding and head have a row of `hidden` weights for each token. In a model of 12 MB
# and 192 values a row 2,048 tokens take 13 % of the weights, and 4,096 would take 27 %, which is
# more than one of eight layers besides.
VOCAB_SIZE = 2048
# One file in so many is held out.
HELD_OUT_ONE_IN = 32
# Shares of a file's shingles (three lines in a row) that other files may have, and of its
# characters that may be digits.
MAX_REPEATED = 0.5
MAX_DIGITS = 0.15
MIN_BYTES, MAX_BYTES = 200, 200_000
TOKENIZER_BYTES = 24_000_000

PERMISSIVE = {"MIT", "MIT-0", "MIT-CMU", "HPND", "ISC", "Zlib", "0BSD", "CC0-1.0", "Unlicense"}
PERMISSIVE |= {"BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0", "Python-2.0", "BSL-1.0"}
# Older metadata have classifiers or free text in place of an SPDX expression.
SPELT = {
    "MIT License": "MIT",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "Apache Software License": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "Python Software Foundation License": "PSF-2.0",
    "Historical Permission Notice and Disclaimer (HPND)": "HPND",
}
NOT_OURS = {"test", "tests", "testing", "_testing", "idle_test", "conftest", "site-packages"}
# Copies of other packages, whose licences the metadata need not name.
NOT_OURS |= {"_vendor", "vendor", "_vendored", "third_party", "extern", "externals", "_distutils"}


def licences(package: metadata.Distribution) -> list[str]:
    """The SPDX names of a package's licences; what is not known stays as it is spelt."""
    fields = package.metadata
    if expression := fields.get("License-Expression"):
        return sorted(set(re.findall(r"[\w.+-]+", expression)) - {"AND", "OR", "WITH"})
    prefix = "License :: OSI Approved :: "
    named = [c.removeprefix(prefix) for c in fields.get_all("Classifier", []) if prefix in c]
    named = named or (fields.get("License") or "").strip().splitlines()[:1] or ["none named"]
    return sorted({SPELT.get(name, name) for name in named})


def dependencies() -> list[metadata.Distribution]:
    """The installed packages that pyproject.toml names, with what they need, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [need for needs in (project["dependencies"], *extras) for need in needs]
    found: dict[str, metadata.Distribution | None] = {project["name"]: None}
    while wanted:
        name = re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", wanted.pop())[0]).lower()
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        wanted += [need for need in found[name].requires or [] if "extra ==" not in need]
    return [found[name] for name in sorted(found) if found[name] is not None]


def files_of(package: metadata.Distribution) -> dict[str, Path]:
    """The paths of a package's modules by the names under which they are imported."""
    return {str(file): Path(file.locate()) for file in package.files or [] if is_module(file)}


def is_module(path) -> bool:
    parts = {part.removesuffix(".py") for part in path.parts}
    is_test = bool(parts & NOT_OURS) or path.name.startswith("test_") or ".." in path.parts
    return path.suffix == ".py" and not is_test and not path.stem.endswith("_test")


def read(path: Path) -> str | None:
    """A file's text, or None if it is not worth learning."""
    try:
        text = path.read_bytes().decode().replace("\r\n", "\n").rstrip() + "\n"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
        return None
    digits = sum(text.count(digit) for digit in "0123456789")
    is_plain = digits < MAX_DIGITS * len(text) and max(map(len, text.splitlines())) <= 400
    return text if is_plain and MIN_BYTES <= len(text) <= MAX_BYTES and END not in text else None


def key(name: str) -> int:
    """A number that stands for a file's path, the same everywhere."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def is_held_out(name: str) -> bool:
    return key(name) % HELD_OUT_ONE_IN == 0


def without_repetitions(texts: dict[str, str]) -> dict[str, str]:
    """The files, in the order of their keys, that do not mostly repeat files before them."""
    seen: set[bytes] = set()
    kept = {}
    for name in sorted(texts, key=key):
        lines = [line.strip() for line in texts[name].splitlines() if line.strip()]
        shingles = {
            hashlib.blake2b("\n".join(lines[i : i + 3]).encode(), digest_size=8).digest()
            for i in range(max(len(lines) - 2, 1))
        }
        if len(shingles & seen) <= MAX_REPEATED * len(shingles):
            kept[name] = texts[name]
        seen |= shingles
    return kept


def make_tokenizer(texts: list[str], vocab_size: int):
    """A byte-level BPE tokenizer. Digits stand alone, so that numbers take no tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise SystemExit(f"{len(texts)} files give only {tokenizer.get_vocab_size()} tokens")
    return tokenizer


def encode(tokenizer, texts: list[str]) -> np.ndarray:
    """The files' tokens in a row, END_ID before each: uint16."""
    parts = []
    for start in range(0, len(texts), 500):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + 500]):
            parts.append(np.array([END_ID, *encoding.ids], np.uint16))
    return np.concatenate(parts)


def decode(tokenizer, tokens: np.ndarray) -> list[str]:
    """The texts of the files in a row of tokens, as encode() gives it."""
    starts = np.flatnonzero(tokens == END_ID)
    return tokenizer.decode_batch([file[1:].tolist() for file in np.split(tokens, starts)[1:]])


def gather() -> tuple[dict[str, str], list[dict]]:
    """All files' texts by name, before repetitions are left out; and what there is to say of each
    source. A name begins with its source.
    """
    sources = [("python", platform.python_version(), ["PSF-2.0"], standard_library())]
    for package in dependencies():
        names = licences(package)
        files = files_of(package) if set(names) <= PERMISSIVE else {}
        sources.append((package.metadata["Name"].lower(), package.version, names, files))
    texts, rows = {}, []
    for source, version, names, files in sources:
        for name, path in files.items():
            text = read(path)
            if text is not None:
                texts[f"{source}/{name}"] = text
        is_taken = set(names) <= PERMISSIVE
        rows.append({"name": source, "version": version, "licences": names, "is_taken": is_taken})
    return texts, rows


def standard_library() -> dict[str, Path]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = ((path.relative_to(folder), path) for path in folder.rglob("*.py"))
    return {str(name): path for name, path in files if is_module(name)}


def write(folder: Path, texts: dict[str, str], rows: list[dict], vocab_size: int) -> dict:
    """Writes a corpus; returns what corpus.json says."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = without_repetitions(texts)
    training = [text for name, text in kept.items() if not is_held_out(name)]
    held_out = [text for name, text in kept.items() if is_held_out(name)]
    num_bytes = sum(len(text.encode()) for text in training)
    step = 1 + num_bytes // TOKENIZER_BYTES
    tokenizer = make_tokenizer(training[::step], vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    parts = {}
    for name, part in (("train", training), ("heldout", held_out)):
        tokens = encode(tokenizer, part)
        if decode(tokenizer, tokens[:100_000])[:-1] != part[: np.sum(tokens[:100_000] == 0) - 1]:
            raise SystemExit("the tokenizer does not give the files back")
        tokens.tofile(folder / f"{name}.bin")
        size = sum(len(text.encode()) for text in part)
        parts[name] = {"files": len(part), "bytes": size, "tokens": len(tokens)}
    files, sizes = Counter(), Counter()
    for name, text in kept.items():
        source = name.partition("/")[0]
        files[source] += 1
        sizes[source] += len(text.encode())
    packages = [row | {"files": files[row["name"]], "bytes": sizes[row["name"]]} for row in rows]
    left_out = len(texts) - len(kept)
    card = {"vocab_size": vocab_size, **parts, "near_duplicates": left_out, "packages": packages}
    (folder / "corpus.json").write_text(json.dumps(card, indent=1) + "\n")
    return card


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("corpus"))
    parser.add_argument("--vocab-size", type=int, default=VOCAB_SIZE)
    options = parser.parse_args()
    card = write(options.out, *gather(), options.vocab_size)
    for row in sorted(card["packages"], key=lambda row: -row["bytes"]):
        what = (
            f"{row['files']:6,} files {row['bytes']:12,} bytes" if row["is_taken"] else "left out"
        )
        print(f"{row['name']} {row['version']} ({', '.join(row['licences'])}): {what}")
    for part in ("train", "heldout"):
        print(part, " ".join(f"{value:,} {name}" for name, value in card[part].items()))


if __name__ == "__main__":
    main()
