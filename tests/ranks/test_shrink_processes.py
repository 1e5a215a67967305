"""shrink() among real processes, one of which is killed before its k-th send, for every k.

The survivors end with the same communicator, and it works. mortal_ranks.py has the jobs.
"""

import json
import subprocess
import sys

import mortal_ranks
import pytest
from long import hunted

pytestmark = pytest.mark.takes(20)


def each_moment(world_size, *bugs):
    """The lines that mortal_ranks.py prints."""
    done = subprocess.run(
        [sys.executable, mortal_ranks.__file__, "each", str(world_size), *bugs],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_a_rank_is_killed_before_any_send():
    world_size = 3
    *found, whole = each_moment(world_size)
    assert found == []
    # It sends more often than once to each peer in each stage.
    assert whole["jobs"] > 5 * world_size * (world_size - 1)


@pytest.mark.parametrize("bug", hunted(["one vote missing", "votes not relayed"]))
def test_a_planted_bug_is_found(bug):
    """A rank that votes and is killed between two sends leaves the others with different ranks."""
    found, _ = each_moment(3, bug)
    assert found["wrong"].startswith("sum must be")
