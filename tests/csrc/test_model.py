"""The Spin model of the packet protocols, csrc/models/packets.pml.

Spin finds no error in it and every planted bug, and the code that it quotes is the current source.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import spin
from source_tree import source_files, without_comments
from spin import MAX_DEPTH, WAITS_FOR_EVER, find_compiler, find_spin

# The searches take half a minute on two cores, longer if these are busy. One test may wait for all.
pytestmark = pytest.mark.timeout(400)

# Name -> definitions of a model without a bug, which is searched completely.
RUNS = {
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

# What can go wrong, as pan says it.
OVERWRITTEN = r"assertion violated\s+!\(unread\["
NOT_OF_THIS_CALL = r"assertion violated\s+\(unread\["
UNORDERED = r"assertion violated\s+\(order\["
WIPED = r"assertion violated\s+\(flag_(memory|in_flight)\["
ENDED_EARLY = r"assertion violated\s+\(+entered\["

LL16 = "KINDS=LL16+BROADCAST"
SENTINEL = "KINDS=SENTINEL"
# definitions -> what goes wrong first
BUGS = {
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


# ---- Searches ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def search(tmp_path_factory) -> Iterator[Callable[[str], str]]:
    """search(definitions): what pan said. All searches start at once, two at a time."""
    # Here, because a search in another thread cannot skip the test.
    find_spin(), find_compiler()

    def run(definitions: str) -> str:
        # Why so little optimisation: compiling takes longer than most of the searches.
        level = "-O1" if definitions in RUNS.values() else "-O0"
        folder = tmp_path_factory.mktemp("model")
        return spin.search("packets.pml", definitions, folder, level)

    with ThreadPoolExecutor(2) as pool:
        said: dict[str, Future[str]] = {
            definitions: pool.submit(run, definitions) for definitions in [*RUNS.values(), *BUGS]
        }
        yield lambda definitions: said[definitions].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("definitions", RUNS.values(), ids=RUNS)
def test_no_run_goes_wrong(search, definitions):
    said = search(definitions)
    assert "errors: 0" in said, said
    # pan says so when it left states out.
    for excuse in ("Search not completed", "max search depth too small", "bit statespace"):
        assert excuse not in said, said
    for checked in ("assertion violations", "invalid end states"):
        assert re.search(rf"{checked}\s+\+", said), said
    depth, states = (
        int(re.search(pattern, said)[1])
        for pattern in (r"depth reached (\d+)", r"(\d+) states, stored")
    )
    assert depth < MAX_DEPTH - 1
    assert states > 1000


def test_every_statement_of_the_model_is_reached_in_some_run(search):
    never = Counter()
    for definitions in RUNS.values():
        listed = re.findall(r'(\w+\.pml:\d+), state \d+, "(.*)"', search(definitions))
        never.update({place for place, statement in listed if statement != "-end-"})
    assert [place for place, count in never.items() if count == len(RUNS)] == []


@pytest.mark.parametrize("definitions", BUGS)
def test_planted_bug_is_found(search, definitions):
    said = search(definitions)
    assert "errors: 1" in said, said
    assert re.search(BUGS[definitions], said), said


def test_every_bug_that_can_be_planted_is():
    listed = re.findall(r"^#define (\w+) \d+", planted_list(), re.MULTILINE)
    used = re.findall(r"PLANTED=(\w+)", " ".join([*RUNS.values(), *BUGS]))
    assert set(listed) == {"NOTHING", *used}


def planted_list() -> str:
    text = (spin.MODELS / "packets.pml").read_text()
    return text[text.index("#define NOTHING") : text.index("#ifndef PLANTED")]


# ---- Quotes ------------------------------------------------------------------------------------

# Functions that are modelled: each access to shared memory and each sync in them is quoted.
MODELLED = {
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


def squeezed(text: str) -> str:
    return "".join(text.split())


def quotes() -> list[tuple[str, str, str]]:
    """(file, function or nothing, code without white space) of each comment that quotes."""
    found = []
    for path in sorted(spin.MODELS.glob("*.pml")):
        for comment in re.findall(r"/\*(.*?)\*/", path.read_text(), re.DOTALL):
            text = re.sub(r"\n\s*\*", " ", comment)
            quote = re.fullmatch(r"\s*(\w+\.(?:cuh|inc))(?: (\w+)\(\))?:(.*)", text, re.DOTALL)
            if quote:
                found.append((quote[1], quote[2] or "", squeezed(quote[3])))
    return found


def body(text: str, function: str) -> str:
    """The bodies of all functions of this name, one after the other."""
    bodies = ""
    for start in re.finditer(rf"KCCL_DEVICE\w* [^;{{}}()]*\b{function}\(", text):
        begin = end = text.index("{", start.end())
        depth = 0
        while depth > 0 or end == begin:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        bodies += text[begin:end]
    return bodies


def test_quoted_code_is_the_code_there_is():
    # If a kernel's file and a header have the same name, the header comes last and is taken.
    every = source_files("csrc/include", "cuh", "inc")
    kernels_first = sorted(every, key=lambda path: path.parent.name != "kernels")
    headers = {path.name: path for path in kernels_first}
    left: dict[tuple[str, str], str] = {
        (name, function): squeezed(body(without_comments(headers[name]), function))
        for name, functions in MODELLED.items()
        for function in functions
    }
    gone = []
    for name, function, code in quotes():
        if (name, function) not in left:
            text = without_comments(headers[name])
            left[name, function] = squeezed(body(text, function) if function else text)
        if code not in left[name, function]:
            gone.append((name, function, code))
        # What is quoted twice must be there twice.
        left[name, function] = left[name, function].replace(code, "", 1)
    assert gone == []
    unmodelled = [
        (name, function, access)
        for name, functions in MODELLED.items()
        for function in functions
        for access in re.findall(ACCESS, left[name, function])
    ]
    assert unmodelled == []
