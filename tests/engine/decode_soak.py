"""Runs the monokernel in the simulator with machines, tunings and seeds that no test has.

    make decode-soak MINUTES=60
    .venv/bin/python tests/engine/decode_soak.py --first 17 --runs 1      # the run with this seed

A run is right if its tokens, keys and values are those of one rank of such a machine without
chunks. Exits with 1 on a finding, and names the seed that repeats it.
"""

import argparse
import random
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from test_monokernel import TUNING
from test_overlaps import run

from kccl import Error

MODELS = ("tiny-laneformer", "tiny-llama", "tiny-qwen2", "tiny-qwen3")
MACHINES = ({}, {"warp_size": 64}, {"warp_size": 64, "model": "gfx942"})
TUNINGS = (
    {},
    {"blocks": 8},
    {"blocks": 8, "kv_splits": 2, "merges_first": True},
    {"in_flight": 1, "stages": 2},
    {"stage_steps": 4},
    {"blocks": 8, "chunk": 4, "chunk_warps": 2, "chunk_stages": 3, "chunk_steps": 2},
    {"blocks": 8, "chunk": 8, "chunk_warps": 3, "chunk_stages": 3, "chunk_steps": 2},
)


@cache
def expected(model, machine):
    """A machine's width of warps changes bits."""
    return found(model, overlaps=True, **MACHINES[machine])


def found(model, **given):
    """The tokens; and the bits of all keys and values, sorted because ranks have parts of them."""
    tokens, caches = run(model, **given)
    return tokens, np.sort(np.frombuffer(b"".join(caches), np.uint16)).tobytes()


def one(seed):
    """Whether the run with this seed is right, and what it was."""
    choose = random.Random(seed)
    model, ranks = choose.choice(MODELS), choose.choice((1, 2, 4))
    machine, change = choose.randrange(len(MACHINES)), choose.choice(TUNINGS)
    given = {"ranks": ranks, "overlaps": choose.random() < 0.8, "seed": seed}
    what = f"{model}, {given}, {MACHINES[machine]}, {change}"
    tuning = replace(TUNING, **change)
    try:
        is_right = found(model, tuning=tuning, **given, **MACHINES[machine]) == expected(
            model, machine
        )
    except Error as error:
        return False, f"{what}: {error}"
    return is_right, what


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--first", type=int, default=time.time_ns() // 1_000_000_000)
    parser.add_argument("--runs", type=int, help="at most so many")
    args = parser.parse_args()
    deadline, seed, findings = time.monotonic() + 60 * args.minutes, args.first, 0
    while time.monotonic() < deadline and (args.runs is None or seed < args.first + args.runs):
        is_right, what = one(seed)
        print(f"seed {seed}: {'right' if is_right else 'WRONG'}: {what}", flush=True)
        findings += not is_right
        seed += 1
    print(f"{seed - args.first} runs, {findings} findings")
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
