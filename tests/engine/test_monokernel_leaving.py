"""Drafts with a pace in the monokernel, simulated: two kernels leave a request to each other."""

from functools import cache
from typing import Any

import pytest
from drafting import tokens_of, told
from long import hunted
from test_monokernel import CONTEXT, kernels
from test_monokernel_drafts import LIKELY, PROMPT, SAMPLED, answers, checkpoint, passes, predicted

import kccl
from kccl.engine import Engine
from kccl.engine.executors import host_requests
from kccl.engine.model.drafts import GPU_PACE, OFF, Drafts
from kccl.engine.model.executor import Token
from kccl.engine.monokernel.launching import Grids

__all__ = ["kernels"]

pytestmark = pytest.mark.takes(60)

AUTO = Drafts(2, adapts=True)
# A first trial that fails, the pause of 16 token steps behind it, and the next trial.
GREEDY = {"max_tokens": 26}
WRONG = range(8)
# So many ids must match before drafts begin (kFewestToLeave).
FEWEST = 5
# Ids that no answer has.
NEVER = Drafts(2, adapts=True, prediction=[LIKELY] * 18)


def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The `start` and the `rest` of rank 0's parts of requests, in their order."""
    seen: list[tuple[int, int]] = []
    decode = Grids.decode

    def spied(grids: Any, decoder: Any, task: Any) -> None:
        if grids._comm.rank == 0:
            seen.append((task.start, task.rest))
        decode(grids, decoder, task)

    monkeypatch.setattr(Grids, "decode", spied)
    return seen


def longest_match(text: list[int]) -> int:
    """How many ids at the text's end also stand before."""
    ends = range(1, len(text))
    return max(
        next(i for i in range(end + 1) if i == end or text[end - 1 - i] != text[-1 - i])
        for end in ends
    )


def test_a_longer_match_begins_drafts(monkeypatch):
    (plain,) = answers("tiny-llama", 3, [(OFF, GREEDY)])
    parts = launched(monkeypatch)
    (found,) = answers("tiny-llama", 3, [(AUTO, GREEDY)])
    assert told(found) == told(plain)
    text = PROMPT + ids_of(plain)
    # The kernel with several columns has the first part, and every other one.
    starts = [start for start, _ in parts]
    assert all(longest_match(text[: at + 1]) >= FEWEST for at in starts[2::2])
    # Some matches are too short to begin drafts.
    waited = [at for a, b in zip(starts[1::2], starts[2::2], strict=False) for at in range(a, b)]
    assert any(FEWEST > longest_match(text[: at + 1]) >= 3 for at in waited)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ranks", "num", "how"),
    [("tiny-llama", 1, 9, {}), ("tiny-laneformer", 2, 22, {"seed": 3})],
)
def test_passes_are_those_of_one_kernel(model, ranks, num, how, kernels, monkeypatch):
    path = kernels / "leaving.cuh"
    text = path.read_text()
    assert text.count(f"kFewestToLeave = {FEWEST};") == 1
    path.write_text(text.replace(f"kFewestToLeave = {FEWEST};", "kFewestToLeave = kFewestAlike;"))
    monkeypatch.setattr(host_requests, "HOST_PACE", GPU_PACE)
    given = {"max_tokens": num}
    with Engine(checkpoint(model), blocks=1, context=CONTEXT) as engine:
        on_host = tokens_of(engine, AUTO, PROMPT, **given)
    parts = launched(monkeypatch)
    (found,) = answers(model, 3, [(AUTO, given)], ranks, **how)
    assert [*map(passes, found)] == [*map(passes, on_host)]
    # The prompt; a text that repeats nothing; then one that does.
    assert len(parts) >= 3 and not any(rest for _, rest in parts)


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-laneformer"])
def test_a_pause_runs_in_the_kernel_with_one_column(model, monkeypatch):
    monkeypatch.setattr(host_requests, "HOST_PACE", GPU_PACE)
    with Engine(checkpoint(model), blocks=1, context=CONTEXT) as engine:
        plain = tokens_of(engine, OFF, PROMPT, **GREEDY)
        prediction = predicted(ids_of(plain), WRONG)[:-3]
        pausing = Drafts(2, adapts=True, prediction=prediction)
        on_host = tokens_of(engine, pausing, PROMPT, **GREEDY)
    parts = launched(monkeypatch)
    (found,) = answers(model, 3, [(pausing, GREEDY)])
    assert [*map(passes, found)] == [*map(passes, on_host)]
    at = len(PROMPT) + 4
    assert parts[:3] == [(0, 0), (at, 16), (at + 16, 0)]


@pytest.mark.long
@pytest.mark.parametrize(("model", "ranks"), [("tiny-laneformer", 1), ("tiny-llama", 2)])
def test_sampled_answers_are_those_without_drafts(model, ranks):
    given = SAMPLED | {"max_tokens": 22}
    # The first answer finds no keys that the others have left in the cache.
    asked = [(NEVER, given), (OFF, given)]
    found, plain = answers(model, 3, asked, ranks)
    assert told(found) == told(plain)


@pytest.mark.long
@pytest.mark.parametrize("stop", [2, 12, 22])
def test_every_end_comes_in_either_kernel(stop):
    (plain,) = answers("tiny-llama", 3, [(OFF, GREEDY)])
    wrong = predicted([each.id for each in plain], WRONG)
    pausing = Drafts(2, adapts=True, prediction=wrong)
    short = GREEDY | {"max_tokens": stop}
    (found,) = answers("tiny-llama", 3, [(pausing, short)])
    assert told(found[:-1]) == told(plain[: stop - 1]) and found[-1].end == "max_tokens"
    stopped = GREEDY | {"stop_ids": [plain[stop].id]}
    expected, found = answers("tiny-llama", 3, [(OFF, stopped), (pausing, stopped)])
    assert told(found) == told(expected)


# File -> text that is there once, and what takes its place: bugs that the simulator must find.
BUGS = {
    "the text lacks the tokens of the kernel with one column": (
        "finish.cuh",
        "if (task.draft_pace != 0 && end == kKcclEngineGoesOn && !is_prompt &&",
        "if (task.draft_pace == 0 && end == kKcclEngineGoesOn && !is_prompt &&",
    ),
    "a kernel begins with no id": (
        "decode.cuh",
        "goes_on(task) ? mem::load_plain(ids + task.start) : 0",
        "0",
    ),
    "a pause ends at once": (
        "leaving.cuh",
        "position + 1 - task.start < task.rest",
        "false",
    ),
    "the pace begins again": (
        "draft_pace.cuh",
        "if (task.pace != 0) {",
        "if (task.pace == 1) {",
    ),
    "counts of the answer begin again": (
        "scores.cuh",
        "if (!goes_on(consumer.task())) begin_text",
        "begin_text",
    ),
    "a kernel runs the last token again": (
        "leaving.cuh",
        "tell(&mailbox->start, position);",
        "tell(&mailbox->start, position - 1);",
    ),
    "the collecting warp does not wait for the first drafts": (
        "collect.cuh",
        "if (goes_on(task) && !await_columns()) return;",
        "",
    ),
}


def shown(model: str, samples: bool, seed: int) -> list[list[tuple[Any, ...]]]:
    """Three answers: with copied drafts, with a pause, and without drafts. The first one finds no
    ids that another has left.
    """
    given = SAMPLED | GREEDY if samples else GREEDY
    asked: list[tuple[Drafts, dict[str, Any]]] = [(each, given) for each in (AUTO, NEVER, OFF)]
    return [[*map(passes, each)] for each in answers(model, 3, asked, seed=seed)]


known = cache(shown)


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_the_simulator_finds_planted_bugs(bug, kernels):
    name, right, wrong = BUGS[bug]
    # Sampling counts ids, and only the Laneformer has messages.
    model = "tiny-laneformer" if name == "collect.cuh" else "tiny-llama"
    samples = name == "scores.cuh"
    expected = known(model, samples, 0)
    *with_drafts, plain = ([each[:2] for each in tokens] for tokens in expected)
    assert all(each == plain for each in with_drafts)
    text = (kernels / name).read_text()
    assert text.count(right) == 1
    (kernels / name).write_text(text.replace(right, wrong))
    for seed in range(8):
        try:
            found = shown(model, samples, seed)
        except (kccl.CompileError, kccl.InvalidArgument):
            raise
        except (kccl.Error, AssertionError):
            return
        if found != expected:
            return
    pytest.fail("8 seeds did not show it")


def ids_of(tokens: list[Token]) -> list[int]:
    return [each.id for each in tokens]
