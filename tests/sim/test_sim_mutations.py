"""The simulator finds every bug of the folder mutations, and nothing in the source as it is."""

import subprocess
import sys
from pathlib import Path

import pytest
import sim_mutations
from mutations import MUTATIONS
from mutations.programs import PROGRAMS
from sim_mutations import BY_NAME, control, controls, hunt


@pytest.mark.parametrize("name", [mutation.name for mutation in MUTATIONS])
def test_it_is_caught(name):
    row = hunt(name)
    assert row.is_right, f"{row.verdict or 'nothing'} after {row.seeds} seeds: {row.message}"


@pytest.mark.parametrize("case", controls(BY_NAME), ids=lambda case: f"{case[0]} {dict(case[1])}")
def test_the_source_as_it_is_passes(case):
    row = control(case)
    assert row.is_right, f"{row.verdict} with seed {row.seeds - 1}: {row.message}"


def test_the_command_runs_the_bugs_that_are_named():
    command = [sys.executable, Path(sim_mutations.__file__), "never_scrubbed"]
    shown = subprocess.check_output(command, text=True)
    assert "1 of 1 bugs caught; the source as it is passes 1 of 1 programs" in shown


def test_every_program_shows_a_mutation():
    assert {mutation.program for mutation in MUTATIONS} == set(PROGRAMS)


def test_names_of_mutations_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
