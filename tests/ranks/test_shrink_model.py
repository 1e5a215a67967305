"""The Spin model of shrink(), csrc/models/survivors.pml.

Spin finds no error in it and every planted bug, and the code that it quotes is the current source.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import (
    Search,
    check_complete,
    check_found,
    never_reached,
    plantable,
    planted,
    quotes,
    searches,
    squeezed,
)
from source_tree import ROOT

# The searches take ten seconds on two cores, longer if these are busy. One test may wait for all.
pytestmark = pytest.mark.timeout(300)

# Name -> definitions of a model without a bug, which is searched completely.
RUNS = {
    "fine steps": "ENDS=2 FINE",
    "a communicator cannot be made": "ENDS=2 FAILURES=1",
    "messages come late": "ENDS=2 QUEUE=2",
    "four ranks, one had ended": "WORLD_SIZE=4 LOST=1 ENDS=2",
}

# What can go wrong, as pan says it.
DIFFERENT = r"assertion violated.*decided=="
NOT_MADE_BY_ALL = r"assertion violated.*made\["
LEFT_OUT = r"assertion violated.*phase\["
WITHOUT_END = r"assertion violated.*attempt\[_pid\]\+1\)<="
WAITS_FOR_EVER = r"invalid end state"

# definitions -> what goes wrong first
BUGS = {
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


@pytest.fixture(scope="module")
def search(tmp_path_factory) -> Iterator[Search]:
    yield from searches(
        "survivors.pml", RUNS.values(), BUGS, lambda: tmp_path_factory.mktemp("model")
    )


@pytest.mark.parametrize("definitions", RUNS.values(), ids=RUNS)
def test_no_run_goes_wrong(search, definitions):
    check_complete(search(definitions))


def test_every_statement_of_the_model_is_reached_in_some_run(search):
    assert never_reached(map(search, RUNS.values())) == []


@pytest.mark.parametrize("definitions", BUGS)
def test_planted_bug_is_found(search, definitions):
    check_found(search(definitions), BUGS[definitions])


def test_every_bug_that_can_be_planted_is():
    assert plantable("survivors.pml") == {"NOTHING", *planted(BUGS)}


# ---- Quotes ------------------------------------------------------------------------------------

# Functions that are modelled: each decision and each message in them is quoted.
MODELLED = {
    "survivors.py": (
        "text",
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
    "mesh.py": ("tell", "hear"),
}
# A decision or a message, in text without white space.
STEP = r"self\._(?:look|say|begin|stop_listening|votes|alive|is_\w+|contradicts|has_members|"
STEP += r"try_to_make)\(|ranks\.(?:hear|tell|ended|is_flushed)\(|link\.\w+\(|(?:make|listen)\(|"
STEP += r"self\._(?:attempt|ended|name|part|members|heard|told)(?:,self\.\w+)*=(?!=)"


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


def test_quoted_code_is_the_code_there_is():
    left = {}
    for name in ("survivors.py", "mesh.py", "link.py"):
        for function, code in functions(ROOT / "kccl/ranks" / name).items():
            left[name, function] = code
    gone = []
    for name, function, code in quotes("py"):
        if code not in left[name, function]:
            gone.append((name, function, code))
        # What is quoted twice must be there twice.
        left[name, function] = left[name, function].replace(code, "", 1)
    assert gone == []
    unmodelled = [
        (name, function, step)
        for name, modelled in MODELLED.items()
        for function in modelled
        for step in re.findall(STEP, left[name, function])
    ]
    assert unmodelled == []
