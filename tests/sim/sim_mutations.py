"""Plants every bug of the folder mutations and lets the simulator find it; then runs the same
programs with the source as it is.

    make sim-mutations
    .venv/bin/python tests/sim/sim_mutations.py never_scrubbed   # only this bug; writes nothing

Prints one line a bug, writes them to bench/records/sim_mutations.jsonl, and exits with 1 when a bug
is missed or a program finds something in the source as it is.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import _support  # noqa: F401  # so that the programs of tests/support are found
from mutations import MUTATIONS
from mutations.programs import PROGRAMS
from rich.console import Console
from rich.table import Table
from source_tree import replace_once

from kccl.bench.harness import document
from kccl.jit import cache as jit

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "bench" / "records" / "sim_mutations.jsonl"
BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}


@dataclass(frozen=True)
class Row:
    """What became of a mutation, or of a program with the source as it is.

    Attributes:
        is_right: The mutation was caught with one of its verdicts; the source as it is passed.
        name, broken: The mutation's; for the source as it is "" and the program's name.
        verdict: The kind of the last run's Outcome.
        seeds: How many seeds were run.
        seconds: How long it took, compiling included.
        message: The last run's.
    """

    is_right: bool
    name: str
    broken: str
    verdict: str
    seeds: int
    seconds: float
    message: str


def edited(mutation):
    """File of csrc -> its text with the bug in it."""
    texts = {}
    for edit in mutation.edits:
        text = texts.get(edit.file) or (jit.CSRC / edit.file).read_text()
        where = f"{edit.file}, for {mutation.name},"
        texts[edit.file] = replace_once(text, edit.old, edit.new, where)
    return texts


def plant(mutation, folder):
    """A copy of the device source with the bug in it. Returns its root."""
    root = Path(folder) / "csrc"
    shutil.copytree(jit.CSRC, root)
    for file, text in edited(mutation).items():
        (root / file).write_text(text)
    return root


def hunt(name):
    """Runs a mutation's program until the simulator finds something."""
    mutation = BY_NAME[name]
    begin = time.perf_counter()
    right = PROGRAMS[mutation.program].right
    with tempfile.TemporaryDirectory() as folder:
        csrc = plant(mutation, folder)
        with PROGRAMS[mutation.program].script(csrc=csrc, **mutation.machine) as script:
            for seed in range(mutation.max_seeds):
                outcome = script.run(seed)
                if outcome.kind != right:
                    break
    return Row(
        outcome.kind in mutation.verdicts,
        mutation.name,
        mutation.broken,
        outcome.kind,
        seed + 1,
        round(time.perf_counter() - begin, 2),
        outcome.message,
    )


def controls(bugs):
    """(program, machine, number of seeds): what these mutations run, each pair once."""
    found = {}
    for mutation in map(BY_NAME.get, bugs):
        key = mutation.program, tuple(mutation.machine.items())
        found[key] = max(found.get(key, 0), mutation.max_seeds)
    return [(*key, max_seeds) for key, max_seeds in found.items()]


def control(case):
    """Runs a program with the source as it is."""
    program, machine, max_seeds = case
    begin = time.perf_counter()
    with PROGRAMS[program].script(**dict(machine)) as script:
        for seed in range(max_seeds):
            outcome = script.run(seed)
            if outcome.kind != PROGRAMS[program].right:
                break
    on = "".join(f", {name} {value}" for name, value in machine)
    return Row(
        outcome.kind == PROGRAMS[program].right,
        "",
        f"{program}{on}",
        outcome.kind,
        seed + 1,
        round(time.perf_counter() - begin, 2),
        outcome.message,
    )


def table(title, words, rows):
    result = Table(title=title, box=None, title_justify="left", padding=(0, 2, 0, 0))
    for column in ("", "bug", "verdict", "seeds", "seconds", "what is broken"):
        result.add_column(column, justify="right" if column in ("seeds", "seconds") else "left")
    for row in rows:
        result.add_row(
            words[row.is_right],
            row.name,
            row.verdict,
            str(row.seeds),
            f"{row.seconds:.2f}",
            row.broken,
        )
    return result


def record(rows):
    """Appends the document of a whole run to RECORD."""
    machine = document.machine(0)
    del machine["ranks"]
    whole = {
        "machine": machine,
        "commit": document.commit(),
        "command": "make sim-mutations",
        "rows": [{"library": "simulator", **asdict(row)} for row in rows],
    }
    # Messages name the tests' own device code by its path on this machine.
    text = json.dumps(whole).replace(f"{ROOT}/", "")
    with RECORD.open("a") as file:
        file.write(text + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bugs", nargs="*", metavar="BUG", help="only these bugs")
    asked = parser.parse_args().bugs
    unknown = sorted(set(asked) - set(BY_NAME))
    if unknown:
        parser.error(f"no bug {', '.join(unknown)}; known are {', '.join(BY_NAME)}")
    bugs = asked or list(BY_NAME)
    console = Console(width=160)
    with tempfile.TemporaryDirectory(prefix="kccl-mutations-") as cache:
        # These kernels are not used again.
        os.environ["KCCL_CACHE"] = cache
        cores = len(os.sched_getaffinity(0))
        with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
            running = [pool.submit(hunt, name) for name in bugs]
            running += [pool.submit(control, case) for case in controls(bugs)]
            rows = [future.result() for future in running]
    found, passed = rows[: len(bugs)], rows[len(bugs) :]
    console.print(table("Planted bugs", ("MISSED", "caught"), found))
    console.print(table("The source as it is", ("FAILED", "passed"), passed))
    wrong = [row for row in rows if not row.is_right]
    for row in wrong:
        console.print(
            f"{row.name} {row.broken}: {row.message}", style="red", markup=False, soft_wrap=True
        )
    if not asked:
        record(rows)
    caught = sum(row.is_right for row in found)
    console.print(
        f"{caught} of {len(found)} bugs caught; the source as it is passes "
        f"{sum(row.is_right for row in passed)} of {len(passed)} programs"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
