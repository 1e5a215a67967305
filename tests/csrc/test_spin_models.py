"""The Spin models in csrc/models.

Spin finds no error in them and every planted bug, and the code that they quote is the current
source.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from operator import itemgetter
from pathlib import Path

import pytest
from long import hunted
from models import (
    Search,
    check_complete,
    check_found,
    check_quotes,
    never_reached,
    plantable,
    planted,
    searches,
    squeezed,
)
from source_tree import ROOT, source_files, without_comments

# The searches take a minute on two cores, longer if these are busy. One test may wait for all.
pytestmark = pytest.mark.takes(20)

# What can go wrong, as pan says it.
WAITS_FOR_EVER = r"invalid end state"

# ---- packets.pml: the packet protocols ----------------------------------------------------------

OVERWRITTEN = r"assertion violated\s+!\(unread\["
NOT_OF_THIS_CALL = r"assertion violated\s+\(unread\["
UNORDERED = r"assertion violated\s+\(order\["
WIPED = r"assertion violated\s+\(flag_(memory|in_flight)\["
ENDED_EARLY = r"assertion violated\s+\(+entered\["

# Name -> definitions of a model without a bug, which is searched completely.
PACKET_RUNS = {
    "three ranks": "WORLD_SIZE=3 KINDS=LL16+BROADCAST",
    "three ranks, sentinel": "WORLD_SIZE=3 KINDS=LL16+SENTINEL",
    "every kind": "KINDS=LL16+BROADCAST+SENTINEL+BARRIER",
    "two threads": "THREADS=2 KINDS=LL16+BROADCAST",
    "two threads, sentinel": "THREADS=2 KINDS=SENTINEL",
    "epochs of 4 bits": "PERIOD=16 KINDS=LL16+BROADCAST",
    "fine steps": "FINE KINDS=BROADCAST",
    "fine steps, pairwise": "FINE KINDS=LL16+BARRIER",
    "fine steps, sentinel": "FINE KINDS=SENTINEL",
    "three sentinel slots": "NUM_SENTINEL_SLOTS=3 KINDS=LL16+SENTINEL",
}

LL16 = "KINDS=LL16+BROADCAST"
SENTINEL = "KINDS=SENTINEL"
# definitions -> what goes wrong first
PACKET_BUGS = {
    f"{LL16} PLANTED=ONE_SLOT": OVERWRITTEN,
    f"{LL16} PLANTED=NO_CREDIT": OVERWRITTEN,
    f"{LL16} PLANTED=CREDIT_OF_AN_EARLIER_CALL": WIPED,
    f"{LL16} PLANTED=ARRIVAL_COMPARED_BEHIND": ENDED_EARLY,
    f"{LL16} PLANTED=NO_SCRUB": NOT_OF_THIS_CALL,
    f"{LL16} PLANTED=NO_SCRUB_BARRIER": OVERWRITTEN,
    f"{LL16} PLANTED=SCRUB_ARRIVES_RELAXED": UNORDERED,
    f"{LL16} PLANTED=SCRUB_AWAITS_RELAXED": UNORDERED,
    f"{LL16} PLANTED=SCRUBBED_TO_THIS_EPOCH": NOT_OF_THIS_CALL,
    f"{LL16} PLANTED=BARRIER_SCRUBBED": WIPED,
    f"{LL16} PLANTED=FLAG_COMPARED_BEHIND": NOT_OF_THIS_CALL,
    f"{LL16} PLANTED=ONE_HALF_CHECKED": NOT_OF_THIS_CALL,
    f"{LL16} THREADS=2 PLANTED=NO_COOP_SYNC": UNORDERED,
    f"{LL16} THREADS=2 PLANTED=ARRIVAL_UNSYNCED": OVERWRITTEN,
    f"{LL16} PERIOD=4": ENDED_EARLY,
    f"{SENTINEL} PLANTED=ONE_HALF_CHECKED": NOT_OF_THIS_CALL,
    f"{SENTINEL} PLANTED=REARM_UNFENCED": UNORDERED,
    f"{SENTINEL} PLANTED=REARM_TOO_EARLY": UNORDERED,
    f"{SENTINEL} NUM_SENTINEL_SLOTS=3 PLANTED=REARM_TOO_LATE": UNORDERED,
    f"{SENTINEL} THREADS=2 PLANTED=REARM_THIS_LENGTH": NOT_OF_THIS_CALL,
    f"{SENTINEL} PLANTED=PAYLOAD_MAY_BE_SENTINEL": WAITS_FOR_EVER,
    f"{SENTINEL} NUM_SENTINEL_SLOTS=2": UNORDERED,
}

# ---- recovery.pml: failure and reset() ----------------------------------------------------------

CAME_LATE_OR_EARLY = r"assertion violated \(cleared\["
WIPED = r"assertion violated \(\(slot\["
STALE = r"assertion violated \(slot_of\["
STALE_FAILURE = r"assertion violated\s+!?\(\s*!?\(abort_word\["
FAILS_AGAIN = r"assertion violated \(resets\["

RECOVERY_RUNS = {
    "two ranks": "",
    "two ranks, more failures than calls": "CALLS=1 NUM_FAILURES=3 NUM_RETRIES=2",
    "three ranks": "WORLD_SIZE=3 CALLS=1 NUM_FAILURES=1",
}
RECOVERY_BUGS = {
    "PLANTED=CALLS_NOT_AWAITED": WAITS_FOR_EVER,
    "PLANTED=CLEARED_UNHEARD": CAME_LATE_OR_EARLY,
    "PLANTED=ONE_PHASE": CAME_LATE_OR_EARLY,
    "PLANTED=PHASE_FORGOTTEN": WIPED,
    "PLANTED=SLOTS_KEPT": STALE,
    "PLANTED=EPOCH_KEPT": WAITS_FOR_EVER,
    "PLANTED=ABORT_KEPT": STALE_FAILURE,
    "PLANTED=STATUS_KEPT": FAILS_AGAIN,
    "PLANTED=UNTOLD": WAITS_FOR_EVER,
}

# ---- survivors.pml: shrink() --------------------------------------------------------------------

DIFFERENT = r"assertion violated.*decided=="
NOT_MADE_BY_ALL = r"assertion violated.*made\["
LEFT_OUT = r"assertion violated.*phase\["
WITHOUT_END = r"assertion violated.*attempt\[_pid\]\+1\)<="

SURVIVOR_RUNS = {
    "fine steps": "ENDS=2 FINE",
    "a communicator cannot be made": "ENDS=2 FAILURES=1",
    "messages come late": "ENDS=2 QUEUE=2",
    "four ranks, one had ended": "WORLD_SIZE=4 LOST=1 ENDS=2",
}
SURVIVOR_BUGS = {
    "ENDS=1 PLANTED=SETTLED_IN_ANY_ATTEMPT": WITHOUT_END,
    "ENDS=0 FAILURES=1 PLANTED=VOTE_OF_AN_EARLIER_ATTEMPT": NOT_MADE_BY_ALL,
    "ENDS=1 PLANTED=LATER_ATTEMPT_IGNORED": WAITS_FOR_EVER,
    "ENDS=1 PLANTED=ENDED_NOT_COMPARED": WITHOUT_END,
    "ENDS=0 PLANTED=TIME_OUT_TAKEN_FOR_END": LEFT_OUT,
    "ENDS=1 PLANTED=VOTED_BEFORE_MADE": NOT_MADE_BY_ALL,
    "ENDS=1 PLANTED=ONE_VOTE_MISSING": NOT_MADE_BY_ALL,
    "ENDS=1 PLANTED=VOTES_NOT_RELAYED": DIFFERENT,
    "ENDS=1 PLANTED=GIVEN_UP_BEFORE_ALL_KNOW": DIFFERENT,
    "ENDS=1 PLANTED=NEVER_GIVEN_UP": WAITS_FOR_EVER,
    "ENDS=1 PLANTED=END_BEFORE_MESSAGES": DIFFERENT,
    "ENDS=1 QUEUE=2 PLANTED=RETURNED_UNFLUSHED": DIFFERENT,
}

MODELS = {
    "packets.pml": (PACKET_RUNS, PACKET_BUGS),
    "recovery.pml": (RECOVERY_RUNS, RECOVERY_BUGS),
    "survivors.pml": (SURVIVOR_RUNS, SURVIVOR_BUGS),
}
ALL_RUNS = {
    f"{model} {name}": (model, definitions)
    for model, (runs, _) in MODELS.items()
    for name, definitions in runs.items()
}
ALL_BUGS = {
    (model, definitions): error
    for model, (_, bugs) in MODELS.items()
    for definitions, error in bugs.items()
}


@pytest.fixture(scope="module")
def search(request, tmp_path_factory) -> Iterator[Search]:
    """Searches all runs, and of the planted bugs those that this session hunts."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    chosen = [call.params["bug"] for call in calls if call.params.get("bug") in ALL_BUGS]
    yield from searches(ALL_RUNS.values(), chosen, lambda: tmp_path_factory.mktemp("model"))


@pytest.mark.long
@pytest.mark.parametrize("run", ALL_RUNS.values(), ids=ALL_RUNS)
def test_no_run_goes_wrong(search, run):
    check_complete(search(*run))


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_every_statement_of_the_model_is_reached_in_some_run(search, model):
    assert never_reached(search(model, each) for each in MODELS[model][0].values()) == []


@pytest.mark.parametrize("bug", hunted(ALL_BUGS, kind=itemgetter(0)), ids=" ".join)
def test_planted_bug_is_found(search, bug):
    check_found(search(*bug), ALL_BUGS[bug])


@pytest.mark.parametrize("model", MODELS)
def test_every_bug_that_can_be_planted_is(model):
    runs, bugs = MODELS[model]
    assert plantable(model) == {"NOTHING", *planted([*runs.values(), *bugs])}


# ---- Quotes of device code -----------------------------------------------------------------------

# Functions that are modelled: each access to shared memory and each sync in them is quoted.
DEVICE_MODELLED = {
    "barrier.cuh": ("arrive", "await"),
    "channel.cuh": (
        "next_plain",
        "next",
        "enter",
        "enter_special",
        "leave",
        "arrive",
        "await",
    ),
    "scrub.cuh": ("scrub",),
    "exchange.cuh": ("push_to", "push", "await_all", "await_one", "exchange"),
    "sentinel.cuh": ("Slots", "push_to", "push", "rearm", "await_all"),
    "all_reduce_one_shot_ll16.cuh": ("all_reduce_one_shot_ll16",),
    "reduce_scatter_direct_ll16.cuh": ("reduce_scatter_direct_ll16",),
    "all_gather_direct_ll16.cuh": ("all_gather_direct_ll16",),
    "all_reduce_one_shot_sentinel.cuh": ("all_reduce_one_shot_sentinel",),
    "barrier_direct.cuh": ("barrier_direct", "acquire_each"),
    "broadcast_direct_ll16.cuh": ("broadcast_direct_ll16",),
}
# An access or a sync, in text without white space.
ACCESS = r"mem::(?:load|store|fence|claim|overwrite|copy)\w*|coop_?\.(?:sync|any)\(|"
ACCESS += r"(?:arrive|await)<|"
ACCESS += r"(?<!is_)(?:scrub|next|next_plain|enter|enter_special|leave|rearm|"
ACCESS += r"push|push_to|await_all|await_one|exchange|send|take)\("


def body(text: str, function: str) -> str:
    """The bodies of all functions of this name, one after the other."""
    bodies = ""
    for start in re.finditer(rf"KCCL_DEVICE\w* [^;{{}}()]*\b{function}\(", text):
        # Parameters may have braces too, as Op{}.
        after, depth = start.end(), 1
        while depth > 0:
            depth += {"(": 1, ")": -1}.get(text[after], 0)
            after += 1
        begin = end = text.index("{", after)
        while depth > 0 or end == begin:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        bodies += text[begin:end]
    return bodies


@cache
def headers() -> dict[str, Path]:
    """By name. If a kernel's or a collective's file and a header have the same name, the header is
    taken.
    """
    every = source_files("csrc/include", "cuh", "inc")
    return {
        path.name: path
        for path in sorted(every, key=lambda it: it.parent.name not in ("kernels", "collectives"))
    }


def test_quoted_device_code_is_the_code_there_is():
    def code(name, function):
        text = without_comments(headers()[name])
        return squeezed(body(text, function) if function else text)

    check_quotes("cuh|inc", code, DEVICE_MODELLED, ACCESS)


# ---- Quotes of Python ----------------------------------------------------------------------------

# Functions that are modelled: each decision and each message in them is quoted.
PYTHON_MODELLED = {
    "knowledge.py": ("text",),
    "survivors.py": (
        "close",
        "_stop_listening",
        "agree",
        "_look",
        "_say",
        "_begin",
        "_votes",
        "_alive",
        "_is_settled",
        "_contradicts",
        "_is_lost",
        "_is_complete",
        "_has_members",
        "_is_decided",
        "_try_to_make",
    ),
    "mesh.py": ("tell", "hear", "reset", "_announce_phase"),
    "comm.py": ("reset",),
}
# A decision or a message, in text without white space.
STEP = r"self\._(?:look|say|begin|stop_listening|votes|alive|is_\w+|contradicts|has_members|"
STEP += r"try_to_make)\(|ranks\.(?:hear|tell|ended|is_flushed)\(|link\.\w+\(|(?:make|listen)\(|"
STEP += r"self\._(?:attempt|ended|name|part|members|heard|told)(?:,self\.\w+)*=(?!=)|"
# The steps of reset().
STEP += r"state\.status=(?!=)|self\._backend\.\w+\(|self\._mesh\.\w+\(|(?<![\w.])clear\(\)|"
STEP += r"self\._(?:announce_phase|exchange|check_complete)\(|"
STEP += r"self\._(?:phase|completed|number)\+?=(?!=)"


def functions(path: Path) -> dict[str, str]:
    """Name -> squeezed body of each function, without docstrings and comments."""
    text = path.read_text()
    lines, found = text.splitlines(keepends=True), {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            if not body:
                continue
            source = "".join(lines[body[0].lineno - 1 : node.end_lineno])
            tokens = tokenize.generate_tokens(io.StringIO("if 1:\n" + source).readline)
            code = [token.string for token in tokens if token.type != tokenize.COMMENT]
            found[node.name] = squeezed("".join(code)).removeprefix("if1:")
    return found


def test_quoted_python_is_the_code_there_is():
    names = ("knowledge", "survivors", "mesh", "link")
    files = (*(f"ranks/{name}.py" for name in names), "comm.py")
    every = {Path(file).name: functions(ROOT / "kccl" / file) for file in files}
    check_quotes("py", lambda name, function: every[name][function], PYTHON_MODELLED, STEP)
