"""The Spin model of failures and reset(), csrc/models/recovery.pml.

Spin finds no error in it and every planted bug.
"""

from collections.abc import Iterator

import pytest
from models import Search, check_complete, check_found, never_reached, plantable, searches

# One test may wait for all searches, and those for other tests.
pytestmark = pytest.mark.timeout(400)

RUNS = {
    "two ranks": "",
    "two ranks, more failures than calls": "CALLS=1 NUM_FAILURES=3 NUM_RETRIES=2",
    "three ranks": "WORLD_SIZE=3 CALLS=1 NUM_FAILURES=1",
}

# What can go wrong, as pan says it.
WAITS_FOR_EVER = r"invalid end state"
CAME_LATE_OR_EARLY = r"assertion violated \(cleared\["
WIPED = r"assertion violated \(\(slot\["
STALE = r"assertion violated \(slot_of\["
STALE_FAILURE = r"assertion violated\s+!?\(\s*!?\(abort_word\["
FAILS_AGAIN = r"assertion violated \(resets\["

BUGS = {
    "CALLS_NOT_AWAITED": WAITS_FOR_EVER,
    "CLEARED_UNHEARD": CAME_LATE_OR_EARLY,
    "ONE_PHASE": CAME_LATE_OR_EARLY,
    "PHASE_FORGOTTEN": WIPED,
    "SLOTS_KEPT": STALE,
    "EPOCH_KEPT": WAITS_FOR_EVER,
    "ABORT_KEPT": STALE_FAILURE,
    "STATUS_KEPT": FAILS_AGAIN,
    "UNTOLD": WAITS_FOR_EVER,
}


@pytest.fixture(scope="module")
def search(tmp_path_factory) -> Iterator[Search]:
    planted = [f"PLANTED={bug}" for bug in BUGS]
    yield from searches(
        "recovery.pml", RUNS.values(), planted, lambda: tmp_path_factory.mktemp("recovery")
    )


@pytest.mark.parametrize("definitions", RUNS.values(), ids=RUNS)
def test_no_run_goes_wrong(search, definitions):
    check_complete(search(definitions))
    assert never_reached([search(definitions)]) == []


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(search, bug):
    check_found(search(f"PLANTED={bug}"), BUGS[bug])


def test_every_bug_that_can_be_planted_is():
    assert plantable("recovery.pml") == {"NOTHING", *BUGS}
