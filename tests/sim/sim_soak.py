"""Explores the whole matrix of sim_matrix.py with seeds of its own, or replays one run.

    make sim-soak MINUTES=60
    .venv/bin/python tests/sim/sim_soak.py --replay broadcast/8/3/32/sm_90/4 --program 7 --seed 9 \\
        --trace out/trace.json

Every pass goes through all cells in a random order, with programs that no pass before had. The
counts are printed, and appended to bench/records/simulator.jsonl. Exits with 1 on a finding.
"""

import argparse
import json
import os
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import sim_matrix
from rich.console import Console
from rich.table import Table
from sim_machine import LL16, Machine
from sim_matrix import CELLS, COLLECTIVES, Cell, Task
from sim_programs import Script

from kccl.bench.harness import document

RECORD = Path(__file__).resolve().parents[2] / "bench" / "records" / "simulator.jsonl"
# Column -> field of KcclSimStats.
REORDERED = {
    "old loads": "old_loads",
    "torn packets": "torn_packets",
    "overtaken stores": "passed_stores",
    "late copies": "late_copies",
}
_LONG = ("8K", "64K")


def cores():
    return len(os.sched_getaffinity(0))


def tasks(first):
    """All cells, again and again, each time with another program."""
    rng = np.random.default_rng(first)
    program = first
    while True:
        for index in rng.permutation(len(CELLS)):
            cell = CELLS[index]
            yield Task(str(cell), program, first, 1 if cell.size in _LONG else 4)
        program += 1


def soak(minutes, first, console):
    """Runs tasks until `minutes` have passed, and returns their results."""
    deadline = time.monotonic() + 60 * minutes
    report_at = time.monotonic() + 60
    results = []
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        running = set()
        for task in tasks(first):
            if time.monotonic() > deadline:
                break
            running.add(pool.submit(sim_matrix.run, task))
            if len(running) < 2 * cores():
                continue
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                results.append(future.result())
                if results[-1].kind:
                    tell(results[-1], console)
            if time.monotonic() > report_at:
                report_at += 60
                runs = sum(result.num_runs for result in results)
                left = max(deadline - time.monotonic(), 0) / 60
                console.print(f"{runs} schedules; {left:.0f} minutes left", style="dim")
        for future in running:
            results.append(future.result())
            if results[-1].kind:
                tell(results[-1], console)
    return results


def tell(result, console):
    """Prints a finding without wrapping lines, so that the command can be copied."""
    console.print(str(result), style="red", markup=False, soft_wrap=True)


def rows(results):
    """A row for each collective: what was run, and how often memory reordered what it did."""
    found = []
    for collective in COLLECTIVES:
        mine = [r for r in results if r.task.cell.startswith(f"{collective}/")]
        stats = sum((r.stats for r in mine), Counter())
        found.append(
            {
                "library": "simulator",
                "collective": collective,
                "cells": len({r.task.cell for r in mine}),
                "of_cells": sum(cell.collective == collective for cell in CELLS),
                "schedules": sum(r.num_runs for r in mine),
                "steps": stats["steps"],
                **{name: stats[name] for name in REORDERED.values()},
                "findings": sum(bool(r.kind) for r in mine),
                "seconds": round(sum(r.seconds for r in mine), 1),
            }
        )
    return found


def table(found):
    result = Table(title="What the simulator explored")
    for name in ("collective", "cells", "schedules", "steps", *REORDERED, "findings", "seconds"):
        result.add_column(name, justify="left" if name == "collective" else "right")
    for row in found:
        result.add_row(
            *(row["collective"], f"{row['cells']}/{row['of_cells']}"),
            *(f"{row[name]:,}" for name in ("schedules", "steps", *REORDERED.values())),
            *(str(row["findings"]), f"{row['seconds']:.0f}"),
        )
    return result


# ---- Throughput --------------------------------------------------------------------------------


def schedules_in(seconds):
    """Runs an all_reduce of 8 KB in bfloat16 of four ranks: the number of runs, and seconds."""
    script = Script(4, Machine(packet_bytes=8192), dtype="bfloat16")
    script.begin(threads=128, style="calls")
    script.all_reduce(0, LL16, 4096)
    count = 0
    begin = time.perf_counter()
    while time.perf_counter() - begin < seconds:
        outcome = script.run(count)
        assert not outcome.kind, outcome.message
        count += 1
    return count, time.perf_counter() - begin


def schedules_per_minute(seconds=5.0):
    """How many of them two processes together run in a minute."""
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(schedules_in, [seconds] * 2))
    return round(sum(count / spent * 60 for count, spent in parts))


# ---- Commands ----------------------------------------------------------------------------------


def replay(args, console):
    script = sim_matrix.script_of(Cell.parse(args.replay), args.program, trace_events=1 << 16)
    outcome = script.run(args.seed)
    if args.trace:
        args.trace.parent.mkdir(parents=True, exist_ok=True)
        script.world.write_trace(args.trace)
        console.print(f"the last steps are in {args.trace}: open it in ui.perfetto.dev")
    console.print(outcome.message or "right", markup=False, soft_wrap=True)
    return 1 if outcome.kind else 0


def explore(args, console):
    speed = schedules_per_minute()
    console.print(f"all_reduce of 8 KB, 4 ranks, 2 processes: {speed} schedules a minute")
    console.print(
        f"{args.minutes:g} minutes on {cores()} cores; programs and seeds from {args.first}"
    )
    results = soak(args.minutes, args.first, console)
    found = rows(results)
    console.print(table(found))
    wrong = [result for result in results if result.kind]
    machine = document.machine(0)
    del machine["ranks"]
    record = {
        "machine": machine,
        "commit": document.commit(),
        "command": f"make sim-soak MINUTES={args.minutes:g}",
        "schedules_per_minute": speed,
        "first": args.first,
        "rows": found,
    }
    if args.record:
        with RECORD.open("a") as file:
            file.write(json.dumps(record) + "\n")
    total = sum(row["schedules"] for row in found)
    steps = sum(row["steps"] for row in found)
    console.print(f"{total:,} schedules, {steps:,} steps, {len(wrong)} findings")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--first", type=int, default=int(time.time()), help="first program, seed")
    parser.add_argument("--no-record", dest="record", action="store_false")
    parser.add_argument("--replay", metavar="CELL", help="replay one run of this cell")
    parser.add_argument("--program", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--trace", type=Path, metavar="F.json", help="write the replayed run's last steps"
    )
    args = parser.parse_args()
    console = Console(width=140)
    return replay(args, console) if args.replay else explore(args, console)


if __name__ == "__main__":
    sys.exit(main())
