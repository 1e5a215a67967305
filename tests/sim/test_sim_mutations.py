"""The simulator finds bugs of the folder mutations, and nothing in the source as it is.

`make test` hunts one bug, `make test-all` one of each file, and `make sim-mutations` every one.
"""

import subprocess
import sys
from pathlib import Path
from zlib import crc32

import mutations
import pytest
import sim_mutations
from mutations import MUTATIONS
from mutations.programs import PROGRAMS
from sim_mutations import control, controls, edited, hunt

FILES = [vars(file)["MUTATIONS"] for file in vars(mutations).values() if hasattr(file, "MUTATIONS")]
# Its program takes ten seconds to compile.
SLOW = ("grid_weight",)
# A bug of each file, always the same.
HUNTED = [
    min(
        (bug.name for bug in bugs if bug.name not in SLOW or len(bugs) == 1),
        key=lambda name: crc32(name.encode()),
    )
    for bugs in FILES
]


def test_every_bug_can_be_planted():
    for mutation in MUTATIONS:
        edited(mutation)


@pytest.mark.long
@pytest.mark.parametrize("name", HUNTED)
def test_it_is_caught(name):
    row = hunt(name)
    assert row.is_right, f"{row.verdict or 'nothing'} after {row.seeds} seeds: {row.message}"


@pytest.mark.mutation
@pytest.mark.parametrize("case", controls(HUNTED), ids=lambda case: f"{case[0]} {dict(case[1])}")
def test_the_source_as_it_is_passes(case):
    row = control(case)
    assert row.is_right, f"{row.verdict} with seed {row.seeds - 1}: {row.message}"


def test_the_command_runs_the_bugs_that_are_named():
    command = [sys.executable, Path(sim_mutations.__file__), "posting_relaxed"]
    shown = subprocess.check_output(command, text=True)
    assert "1 of 1 bugs caught; the source as it is passes 1 of 1 programs" in shown


def test_every_program_shows_a_mutation():
    assert {mutation.program for mutation in MUTATIONS} == set(PROGRAMS)


def test_names_of_mutations_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
