"""The Spin model of failures and reset(), csrc/models/recovery.pml.

Spin finds no error in it and every planted bug.
"""

import re

import pytest
import spin
from spin import MAX_DEPTH, WAITS_FOR_EVER

RUNS = {
    "two ranks": "",
    "two ranks, more failures than calls": "CALLS=1 NUM_FAILURES=3 NUM_RETRIES=2",
    "three ranks": "WORLD_SIZE=3 CALLS=1 NUM_FAILURES=1",
}

# What can go wrong, as pan says it.
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


@pytest.mark.parametrize("definitions", RUNS.values(), ids=RUNS)
def test_no_run_goes_wrong(tmp_path, definitions):
    said = spin.search("recovery.pml", definitions, tmp_path, "-O1")
    assert "errors: 0" in said, said
    # pan says so when it left states out.
    for excuse in ("Search not completed", "max search depth too small", "bit statespace"):
        assert excuse not in said, said
    assert int(re.search(r"depth reached (\d+)", said)[1]) < MAX_DEPTH - 1
    assert int(re.search(r"(\d+) states, stored", said)[1]) > 10000
    # Every statement is reached.
    never = re.findall(r'recovery\.pml:\d+, state \d+, "(.*)"', said)
    assert set(never) <= {"-end-"}, never


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(tmp_path, bug):
    said = spin.search("recovery.pml", f"PLANTED={bug}", tmp_path)
    assert "errors: 1" in said, said
    assert re.search(BUGS[bug], said), said


def test_every_bug_that_can_be_planted_is():
    text = (spin.MODELS / "recovery.pml").read_text()
    listed = text[text.index("#define NOTHING") : text.index("#ifndef PLANTED")]
    assert set(re.findall(r"#define (\w+) \d+", listed)) == {"NOTHING", *BUGS}
