"""The simulator finds every bug of the folder mutations, and nothing in the source as it is."""

import pytest
from mutations import MUTATIONS
from sim_mutations import control, controls, hunt


@pytest.mark.parametrize("name", [mutation.name for mutation in MUTATIONS])
def test_it_is_caught(name):
    row = hunt(name)
    assert row.is_right, f"{row.verdict or 'nothing'} after {row.seeds} seeds: {row.message}"


@pytest.mark.parametrize("case", controls(), ids=lambda case: f"{case[0]} {dict(case[1])}")
def test_the_source_as_it_is_passes(case):
    row = control(case)
    assert row.is_right, f"{row.verdict} with seed {row.seeds - 1}: {row.message}"


def test_names_of_mutations_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
