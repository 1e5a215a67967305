"""Small calls by postings on the simulator; tests/sim/mutations/postings.py plants bugs in them."""

import pytest
from long import long_beyond_each
from mutations.posting_programs import PostedProgram


@pytest.mark.parametrize(
    ("world_size", "warp_size", "model"),
    long_beyond_each((2, 3, 8, 1), (32, 64), ("sm_90", "gfx942")),
)
def test_what_ranks_take_is_what_was_posted(world_size, warp_size, model):
    machine = {"warp_size": warp_size, "model": model}
    with PostedProgram(world_size, 100).script(**machine) as script:
        for seed in range(4):
            outcome = script.run(seed)
            assert not outcome.kind, outcome
