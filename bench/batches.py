"""What answering several requests at a time gains: python -m kccl.bench.batches --model smollm2

Asks for 1, 2, 4 and 8 answers at once, of an engine that answers as many at a time and of one that
answers them one after the other. Compares their tokens. Prints the tokens of all answers a second,
against those of one answer, and when first tokens came. Then it measures the first token of a
request that comes while others are answered, and what its prompt costs them. Both engines are open
at a time, and answer in turn, so that other work of the machine hits both.

Names of random weights, as of `kccl bench decode --random-weights`, do for --model.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from kccl.engine import Engine
from kccl.engine.files.checkpoint import open_checkpoint
from kccl.engine.files.models import find_model
from kccl.engine.files.random_weights import MODELS, random_checkpoint
from kccl.engine.serving.submission import Submission
from kccl.engine.text.pieces import Piece

from .harness.document import document, machine

_NUMBERS = (1, 2, 4, 8)


class Seen(NamedTuple):
    """What came of some requests that were made at once.

    Attributes:
        ids: The ids of each answer.
        tok_s: The tokens of all answers a second, from the requests to the last token.
        first_s: The seconds to each answer's first token.
        cpu_s: The CPU time of this process for each token. It also counts threads that poll.
    """

    ids: list[list[int]]
    tok_s: float
    first_s: list[float]
    cpu_s: float


def _prompt(engine: Engine, number: int, length: int) -> list[int]:
    """Returns the prompt of a request; two of them have no beginning in common."""
    size = min(1000, engine.config.vocab_size - 1)
    return [1 + (number * 7919 + 31 * i) % size for i in range(length)]


def _submit(engine: Engine, number: int, prompt: int, tokens: int) -> Submission[Piece]:
    ids = _prompt(engine, number, prompt)
    return engine.submit(ids, max_tokens=tokens, temperature=0, stop_ids=())


def _together(engine: Engine, number: int, prompt: int, tokens: int, turn: int) -> Seen:
    """Makes some requests at once, and waits for their ends."""
    began, cpu = time.monotonic(), time.process_time()
    asked = [_submit(engine, 100 * turn + i, prompt, tokens) for i in range(number)]
    answers = [list(each) for each in asked]
    took = max(each[-1].time_s for each in answers) - began
    first = [each[0].time_s - began for each in answers]
    ids = [[piece.id for piece in each] for each in answers]
    num = sum(map(len, ids))
    return Seen(ids, num / took, first, (time.process_time() - cpu) / num)


def _late(engine: Engine, others: int, prompt: int, tokens: int, turn: int) -> tuple[float, float]:
    """Makes a request while `others` are answered. Returns the seconds to its first token, and the
    longest time that another answer then waited for a token.
    """
    running = [_submit(engine, 100 * turn + i, 8, tokens) for i in range(others)]
    for each in running[: engine.slots]:
        next(iter(each))
    began = time.monotonic()
    first = next(iter(_submit(engine, 100 * turn + 50, prompt, 2))).time_s
    times = [[piece.time_s for piece in each] for each in running]
    gaps = [b - a for each in times for a, b in pairwise(each) if b > began and a < first]
    return first - began, max(gaps, default=0.0)


def main(given: Sequence[str] | None = None) -> int:
    """Runs the benchmark. Returns 1 if a token differs from that of the queue."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", metavar="M", help="(smollm2)")
    parser.add_argument("-n", type=int, metavar="RANKS", help="ranks as threads (1)")
    parser.add_argument("--blocks", type=int, metavar="N", help="threads of each rank (all cores)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="(3)")
    parser.add_argument("--prompt", type=int, default=32, metavar="N", help="tokens (32)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of an answer (32)")
    parser.add_argument("--late-prompt", type=int, default=128, metavar="N", help="tokens (128)")
    args = parser.parse_args(given)
    facts = machine(args.n or 1) | {"model": Path(args.model).name}
    facts |= {"python": sys.version.split()[0]}
    known = args.model in MODELS
    found = random_checkpoint(args.model) if known else open_checkpoint(find_model(args.model))
    context = min(1024, found.config.longest_context)
    shape = {"ranks": args.n, "blocks": args.blocks, "context": context, "tokenizer": False}
    rows = []
    with Engine(found, **shape, slots=8) as batch, Engine(found, **shape) as queue:
        turn = 0
        alone: list[float] = []
        for number in _NUMBERS:
            seen: dict[str, list[Seen]] = {"slots": [], "queue": []}
            wrong = 0
            for _ in range(args.rounds):
                turn += 1
                for name, engine in (("slots", batch), ("queue", queue)):
                    seen[name].append(_together(engine, number, args.prompt, args.tokens, turn))
                wrong += seen["slots"][-1].ids != seen["queue"][-1].ids
            row: dict[str, float] = {"requests": number, "wrong": wrong}
            for name, all_seen in seen.items():
                row[f"{name}_tok_s"] = statistics.median(each.tok_s for each in all_seen)
                row[f"{name}_cpu_ms"] = 1e3 * statistics.median(each.cpu_s for each in all_seen)
                row[f"{name}_first_ms"] = 1e3 * statistics.median(
                    max(each.first_s) for each in all_seen
                )
            alone = alone or [row["queue_tok_s"]]
            row["ratio"] = row["slots_tok_s"] / alone[0]
            rows.append(row)
            print(json.dumps(row), flush=True)
        for others in (0, 3, 7):
            late = []
            for _ in range(args.rounds):
                turn += 1
                some = [
                    _late(engine, others, args.late_prompt, args.tokens, turn)
                    for engine in (batch, queue)
                ]
                late.append([1e3 * value for pair in some for value in pair])
            names = ("slots_first_ms", "slots_gap_ms", "queue_first_ms", "queue_gap_ms")
            medians = [statistics.median(each) for each in zip(*late, strict=True)]
            row = {"others": others} | dict(zip(names, medians, strict=True))
            rows.append(row)
            print(json.dumps(row), flush=True)
    print(json.dumps(document(rows, facts, given, ("python", "-m", "kccl.bench.batches"))))
    return int(any(row.get("wrong") for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
