"""The corpus that examples/train_laneformer makes, and its 5-gram model. Neither needs PyTorch."""

from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import corpus
import numpy as np
import pytest
from ngram import NgramModel


def package(**fields):
    """Metadata with these fields; a list gives one field several times."""
    message = Message()
    for name, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            message[name.replace("_", "-")] = value
    return SimpleNamespace(metadata=message)


@pytest.mark.parametrize(
    ("fields", "is_permissive"),
    [
        ({"License_Expression": "MIT"}, True),
        ({"License_Expression": "(Apache-2.0 OR BSD-3-Clause) AND MIT"}, True),
        ({"License_Expression": "MPL-2.0 AND MIT"}, False),
        ({"License_Expression": "LGPL-2.1-only OR MIT"}, False),
        ({"License_Expression": "MIT", "Classifier": "License :: Other/Proprietary"}, True),
        ({"Classifier": ["Topic :: X", "License :: OSI Approved :: BSD License"]}, True),
        ({"Classifier": ["License :: OSI Approved :: GNU General Public License (GPL)"]}, False),
        (
            {
                "Classifier": [
                    "License :: OSI Approved :: MIT License",
                    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)",
                ]
            },
            False,
        ),
        ({"License": "Apache 2.0"}, True),
        ({"License": "NVIDIA Proprietary Software"}, False),
        ({"License": " "}, False),
        ({}, False),
    ],
    ids=str,
)
def test_licences(fields, is_permissive):
    assert (set(corpus.licences(package(**fields))) <= corpus.PERMISSIVE) == is_permissive


@pytest.mark.parametrize(
    ("path", "is_taken"),
    [
        ("a/b.py", True),
        ("a/contest.py", True),
        ("a/b.pyi", False),
        ("a/tests/b.py", False),
        ("a/testing.py", False),
        ("a/test_b.py", False),
        ("a/b_test.py", False),
        ("a/_vendor/b.py", False),
        ("../bin/b.py", False),
    ],
)
def test_modules(path, is_taken):
    assert corpus.is_module(Path(path)) == is_taken


def function(name, number=20):
    return "".join(f"def {name}_{i}(x):\n    return x + {name}[{i}]\n" for i in range(number))


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        (function("f"), True),
        (function("f").replace("\n", "\r\n"), True),
        (function("f") + "def\n", False),
        ("x = 1\n", False),
        ("TABLE = [\n" + "    1234567, 8901234,\n" * 40 + "]\n", False),
        (function("f") + f"x = '{'y' * 500}'\n", False),
        (function("f") + f"x = {corpus.END!r}\n", False),
    ],
    ids=["plain", "CRLF", "syntax error", "short", "table", "long line", "special token"],
)
def test_files_worth_learning(tmp_path, text, is_taken):
    (tmp_path / "a.py").write_text(text, newline="")
    read = corpus.read(tmp_path / "a.py")
    assert read == (text.replace("\r\n", "\n") if is_taken else None)


def test_near_duplicates_are_left_out():
    texts = {"a": function("f"), "b": function("f") + "x = 1\n", "c": function("g")}
    texts["d"] = "\n\n".join(line for line in function("g").splitlines()) + "\n"
    kept = corpus.without_repetitions(texts)
    assert {text.split("(")[0] for text in kept.values()} == {"def f_0", "def g_0"}
    assert len(kept) == 2
    backwards = corpus.without_repetitions(dict(reversed(texts.items())))
    assert list(backwards.items()) == list(kept.items())


def test_the_same_files_give_the_same_corpus(tmp_path):
    texts = {f"p/{i}.py": function(f"name{i}", 12) + f"# é {i} 漢字\n" for i in range(90)}
    rows = [{"name": "p", "version": "1", "licences": ["MIT"], "is_taken": True}]
    card = corpus.write(tmp_path / "a", texts, rows, vocab_size=270)
    corpus.write(tmp_path / "b", dict(reversed(texts.items())), rows, vocab_size=270)
    for file in sorted((tmp_path / "a").iterdir()):
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
    assert card["train"]["files"] + card["heldout"]["files"] == 90
    assert card["packages"][0]["files"] == 90

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer.json"))
    tokens = np.fromfile(tmp_path / "a" / "heldout.bin", np.uint16)
    held_out = [text for name, text in texts.items() if corpus.is_held_out(name)]
    assert sorted(corpus.decode(tokenizer, tokens)) == sorted(held_out) != []
    assert len(tokens) == card["heldout"]["tokens"]


# ---- The 5-gram model --------------------------------------------------------------------------

VOCAB_SIZE = 7


def chain(length, seed):
    """Tokens of which each follows from the one before with probability 0.9; and bits a token."""
    rng = np.random.default_rng(seed)
    tokens = [0]
    for _ in range(length - 1):
        jumps = rng.random() < 0.1
        tokens.append(int(rng.integers(VOCAB_SIZE)) if jumps else (3 * tokens[-1] + 1) % VOCAB_SIZE)
    shares = np.array([0.9 + 0.1 / VOCAB_SIZE, *[0.1 / VOCAB_SIZE] * (VOCAB_SIZE - 1)])
    return np.array(tokens, np.uint16), float(-(shares * np.log2(shares)).sum())


def test_probabilities_add_up_to_one():
    tokens, _ = chain(400, seed=1)
    model = NgramModel(tokens, VOCAB_SIZE)
    rng = np.random.default_rng(2)
    for context in [tokens[10:14], *rng.integers(VOCAB_SIZE, size=(20, 4)).astype(np.uint16)]:
        bits = [model.bits(np.append(context, np.uint16(token))) for token in range(VOCAB_SIZE)]
        assert sum(2.0**-each for each in bits) == pytest.approx(1)


def test_bits_come_near_the_entropy():
    model = NgramModel(chain(60_000, seed=1)[0], VOCAB_SIZE)
    tokens, entropy = chain(20_000, seed=2)
    assert entropy < model.bits(tokens) / (len(tokens) - 4) < 1.1 * entropy


def test_a_vocabulary_must_fit_into_the_keys():
    with pytest.raises(ValueError, match="at most 4096"):
        NgramModel(np.zeros(9, np.uint16), 4097)
