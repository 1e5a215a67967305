"""What lossless drafts gain: python -m kccl.bench.drafts --model bundled --backend cuda

Answers the same prompts with and without drafts, in turn on one engine, and compares their tokens.
A chat model answers 20 fixed questions about code. Another model continues beginnings of files of
Python's standard library that examples/train_laneformer holds out of its training. Random weights
have no text: their drafts are their own answer, in which each id is right with a probability.
"""

import argparse
import hashlib
import json
import statistics
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import kccl
from kccl.engine import Drafts, Engine
from kccl.engine.executors.opening import BACKENDS, drafts_for
from kccl.engine.files.random_weights import MODELS, random_checkpoint

from .harness.document import document, machine

# Files that the bundled model has not seen, and how many lines of each are the prompt.
HELD_OUT = (
    *(("asyncio/base_futures.py", 30), ("asyncio/base_tasks.py", 40), ("asyncio/locks.py", 120)),
    *(("asyncio/locks.py", 330), ("copy.py", 110), ("copy.py", 200), ("dbm/dumb.py", 100)),
    *(("dbm/dumb.py", 190), ("email/base64mime.py", 60), ("email/utils.py", 120)),
    *(("email/utils.py", 240), ("unittest/result.py", 80)),
)
QUESTIONS = (
    "Write a Python function that returns the mean of a list of numbers.",
    "Write a Python function that tells whether a number is prime.",
    "Write a Python class for a stack with push, pop and peek.",
    "Write a Python function that merges two sorted lists.",
    "Write a Python function that reverses the words of a sentence.",
    "Write unit tests in Python for a function add(a, b).",
    "Write a Python function that counts how often each word occurs in a text.",
    "Write a Python function that reads a CSV file and returns a list of dictionaries.",
    "Write a Python class for a bank account with deposit and withdraw.",
    "Write a Python function for binary search in a sorted list.",
    "Write a Python program that prints the numbers from 1 to 100, with FizzBuzz.",
    "Write a Python function that computes the Fibonacci numbers up to n.",
    "Add a docstring to this function:\ndef area(width, height):\n    return width * height",
    "Rename x to total in this code, and print all of it:\n"
    "x = 0\nfor value in values:\n    x = x + value\n    print(x)\nprint('the sum is', x)",
    "Write this function again with type hints:\n"
    "def clamp(value, low, high):\n    if value < low:\n        return low\n"
    "    if value > high:\n        return high\n    return value",
    "Write a C function that computes the length of a string.",
    "Write a JavaScript function that removes duplicates from an array.",
    "Write an SQL query that counts the orders of each customer.",
    "Write a Python function that transposes a matrix given as a list of lists.",
    "Write a Python dataclass for a point, with methods that add and scale.",
)
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.6, "top_p": 1.0, "top_k": 0, "seed": 1},
}


@dataclass(frozen=True)
class Timed:
    """An answer.

    Attributes:
        ids: Its ids.
        rest_s: Seconds from its first token to its last one.
        accepted, proposed: How many drafts it accepted, and how many its passes had.
    """

    ids: list[int]
    rest_s: float
    accepted: int
    proposed: int


def held_out() -> list[tuple[str, str]]:
    """Returns the name and the text of each beginning of a held-out file that this interpreter's
    standard library has.
    """
    folder, found = Path(sysconfig.get_paths()["stdlib"]), []
    for name, lines in HELD_OUT:
        try:
            whole = (folder / name).read_text("utf-8").splitlines()
        except FileNotFoundError:
            continue
        found.append((f"{name}:{lines}", "\n".join(whole[:lines])))
    return found


def _prompts(engine: Engine, args: argparse.Namespace) -> list[tuple[str, list[int]]]:
    """Returns the name and the ids of each prompt. All leave room for the answer."""
    room = engine.context - args.tokens
    if args.random_weights is not None:
        noise = np.random.default_rng(1)
        return [("random", noise.integers(engine.config.vocab_size, size=min(512, room)).tolist())]
    tokenizer = engine.tokenizer
    if tokenizer.has_chat_template:
        system = {"role": "system", "content": _SYSTEM}
        asked = [[system, {"role": "user", "content": each}] for each in QUESTIONS]
        found = [(each[1]["content"], tokenizer.chat(each)) for each in asked]
    else:
        found = [(name, tokenizer.encode(text)[-room:]) for name, text in held_out()]
    return found[: args.prompts]


def _answer(engine: Engine, ids: Sequence[int], drafts: Drafts, **given: Any) -> Timed:
    with engine.drafting(drafts):
        pieces = list(engine.stream(ids, **given))
    rest_s = pieces[-1].time_s - pieces[0].time_s
    told = engine.drafted
    return Timed([each.id for each in pieces], rest_s, told.accepted, told.proposed)


def _predicting(ids: Sequence[int], share: float, vocab_size: int) -> tuple[int, ...]:
    """Returns an answer's ids, each right with this probability."""
    noise = np.random.default_rng(7)
    is_right = noise.random(len(ids)) < share
    return tuple(
        each if right else (each + 1) % vocab_size
        for each, right in zip(ids, is_right.tolist(), strict=True)
    )


def _setting(backend: str, given: str) -> Drafts:
    """Returns the drafts of an argument of `--drafts`."""
    most, _, rest = given.partition("-")
    drafts = drafts_for(backend, int(most) if most.isdecimal() else most)
    return replace(drafts, uses_ngrams=rest != "copied")


def _rows(
    engine: Engine, name: str, ids: list[int], how: str, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Times a prompt's answers in turn: without drafts, and with each setting of `--drafts`."""
    given = _HOW[how] | {"max_tokens": args.tokens}
    if args.random_weights is not None:
        given["stop_ids"] = ()
    off = drafts_for(args.backend, "off")
    plain = _answer(engine, ids, off, **given)
    settings: dict[str, Drafts] = {"off": off}
    for each in args.drafts:
        drafts = _setting(args.backend, each)
        if args.accept is not None:
            predicted = _predicting(plain.ids, args.accept, engine.config.vocab_size)
            drafts = Drafts(drafts.most, drafts.adapts, prediction=predicted)
        settings[each] = drafts
    found: dict[str, list[Timed]] = {each: [] for each in settings}
    for _ in range(args.repeats):
        for each, drafts in settings.items():
            found[each].append(_answer(engine, ids, drafts, **given))
    rows = []
    for each, runs in found.items():
        one = runs[0]
        rest_s = statistics.median(run.rest_s for run in runs)
        rows.append(
            {
                **{"prompt": name, "prompt_tokens": len(ids), "how": how, "drafts": each},
                **{"tokens": len(one.ids), "passes": len(one.ids) - one.accepted},
                **{"accepted": one.accepted, "proposed": one.proposed},
                **{"rest_ms": 1e3 * rest_s, "same": all(run.ids == plain.ids for run in runs)},
                "hash": hashlib.sha256(repr((ids, one.ids)).encode()).hexdigest()[:12],
            }
        )
    return rows


def totals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds up the rows of each way of choosing tokens and each setting. `ratio` is how many times
    as fast as without drafts the answers came, first tokens left out.
    """
    found = []
    for how in dict.fromkeys(row["how"] for row in rows):
        some = [row for row in rows if row["how"] == how]
        off_ms = sum(row["rest_ms"] for row in some if row["drafts"] == "off")
        for drafts in dict.fromkeys(row["drafts"] for row in some):
            mine = [row for row in some if row["drafts"] == drafts]
            names = ("tokens", "passes", "accepted", "proposed", "rest_ms")
            summed = {name: sum(row[name] for row in mine) for name in names}
            timed = summed["tokens"] - len(mine)
            found.append(
                {"how": how, "drafts": drafts, **summed}
                | {"us_per_token": 1e3 * summed["rest_ms"] / timed if timed else None}
                | {"ratio": off_ms / summed["rest_ms"] if summed["rest_ms"] else None}
                | {"same": all(row["same"] for row in mine)}
            )
    return found


def _shown(row: dict[str, Any]) -> str:
    us, ratio = row["us_per_token"], row["ratio"]
    return (
        f"{row['how']:<8} {row['drafts']:>4} {row['tokens']:7} {row['passes']:7} "
        f"{row['accepted']:8} {row['proposed']:8} {us or 0:9.1f} {ratio or 0:6.2f} "
        f"{'yes' if row['same'] else 'NO':>5}"
    )


def arguments() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="bundled", metavar="M", help="(bundled)")
    model.add_argument("--random-weights", metavar="SHAPE", help=f"{', '.join(MODELS)}")
    parser.add_argument("--backend", default="host", choices=BACKENDS, help="(host)")
    parser.add_argument("-n", type=int, metavar="RANKS", help="ranks as threads (1)")
    parser.add_argument("--weights", metavar="W", help="as kccl generate's")
    parser.add_argument("--context", type=int, metavar="N", help="tokens to make room for")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="of an answer (256)")
    parser.add_argument("--prompts", type=int, metavar="N", help="only the first N prompts")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="of each answer (1)")
    parser.add_argument(
        "--drafts",
        nargs="+",
        default=["3", "auto"],
        help="settings; 3-copied: 3 without the table of n-grams (3 auto)",
    )
    parser.add_argument("--ngrams", metavar="F", help="as kccl generate's")
    parser.add_argument("--how", nargs="+", default=[*_HOW], choices=_HOW, help="(both)")
    parser.add_argument(
        "--accept",
        type=float,
        metavar="P",
        help="drafts are the answer itself, each id right with probability P",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="write the rows as JSON")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 1 if a token differs from that without drafts."""
    args = arguments().parse_args(given)
    if args.random_weights is not None and args.accept is None:
        raise kccl.InvalidArgument("--random-weights have no text to copy from: add --accept P")
    facts = machine(args.n or 1)
    model = random_checkpoint(args.random_weights) if args.random_weights else args.model
    settings = [_setting(args.backend, each) for each in args.drafts]
    most = max((each.most for each in settings if not each.adapts), default="auto")
    with Engine(
        model,
        args.backend,
        args.n,
        context=args.context,
        weights=args.weights,
        drafts=most,
        ngrams=args.ngrams,
    ) as engine:
        facts |= {"gpus": engine.devices(), "model": args.random_weights or Path(args.model).name}
        facts |= {"python": sys.version.split()[0], "accept": args.accept}
        rows: list[dict[str, Any]] = []
        for name, ids in _prompts(engine, args):
            for how in args.how:
                rows += _rows(engine, name, ids, how, args)
                for row in rows[-1 - len(args.drafts) :]:
                    print(
                        f"# {row['prompt'].splitlines()[0]:.60}: {how}, drafts {row['drafts']}, "
                        f"{row['tokens']} tokens in {row['rest_ms']:.1f} ms, {row['accepted']} of "
                        f"{row['proposed']} drafts accepted",
                        flush=True,
                    )
        summed = totals(rows)
    print("how      drafts tokens  passes accepted proposed  us/token  ratio  same")
    for each in summed:
        print(_shown(each), flush=True)
    if args.json is not None:
        asked = sys.argv[1:] if given is None else given
        asked = [each for each in asked if each not in ("--json", str(args.json))]
        facts |= {"totals": summed}
        made = document(rows, facts, asked, ("python", "-m", "kccl.bench.drafts"))
        args.json.write_text(json.dumps(made) + "\n")
    return int(not all(row["same"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
