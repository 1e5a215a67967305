"""Several requests in one monokernel, simulated: each has the tokens that it has alone."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from long import hunted
from test_monokernel import CONTEXT, MERGING, SMALL, TUNING, kernels
from test_monokernel_masks import mask_of

import kccl
from kccl.engine.executors.device import DeviceExecutor
from kccl.engine.executors.device_batch import BatchedDevice
from kccl.engine.executors.device_member import DeviceMember
from kccl.engine.files.checkpoint import Checkpoint
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.executor import Place, Token
from kccl.engine.model.grammar import Grammar
from kccl.engine.model.program import Program
from kccl.engine.model.sample import SamplingParams
from kccl.engine.monokernel.limits import check_requests
from kccl.engine.monokernel.shape import Tuning

__all__ = ["kernels"]

pytestmark = pytest.mark.takes(60)

SEATS = 3
CHUNKS = {"chunk": 4, "chunk_warps": 2, "chunk_stages": 3, "chunk_steps": 2}
LAYERS: dict[str, dict[str, Any]] = {
    # The messages of the first layer land in the third.
    "tiny-laneformer": {"num_layers": 3, "window": 4, "window_layers": 2},
    "tiny-llama": {"num_layers": 1},
    "tiny-laneformer of 2": {"num_layers": 2, "num_lanes": 2, "window_layers": 1},
}
SAMPLED: dict[str, Any] = {"temperature": 0.7, "top_k": 12, "logprobs": True, "top_logprobs": 2}
# The prompt, how its tokens are chosen, and behind how many tokens of the request before it joins.
# They have tiles of positions of their own, end at different times, and are more than seats.
REQUESTS: list[tuple[list[int], dict[str, Any], int]] = [
    ([5, 99, 17, 64, 2], {"max_tokens": 14}, 0),
    ([7 * i % 128 for i in range(20)], {"max_tokens": 5, "seed": 1} | SAMPLED, 0),
    ([3], {"max_tokens": 9, "seed": 2, "repetition_penalty": 1.3} | SAMPLED, 2),
    ([90, 4], {"max_tokens": 6, "frequency_penalty": 0.4, "logit_bias": {3: 2.0}}, 1),
    ([11, 12, 13], {"max_tokens": 4}, 2),
]
# With masks, as of a grammar.
MASKED: dict[str, Any] = {"max_tokens": 6, "seed": 3, "temperature": 0.9, "top_p": 0.9}
MASKED |= {"frequency_penalty": 0.4, "logit_bias": {3: 2.0}, "grammar": Grammar.regex("(?s).*")}
SHORT = [REQUESTS[0], REQUESTS[1], ([90, 4], MASKED, 1)]
# For `make test`.
SHORTER: list[tuple[list[int], dict[str, Any], int]] = [
    ([5, 99, 17, 64, 2], {"max_tokens": 7}, 0),
    ([7 * i % 128 for i in range(11)], {"max_tokens": 3, "seed": 1} | SAMPLED, 0),
    ([90, 4], MASKED | {"max_tokens": 4}, 1),
]


@cache
def checkpoint(model: str) -> Checkpoint:
    return random_checkpoint(model.partition(" ")[0], **SMALL | LAYERS[model])


def told(tokens: list[Any]) -> list[Any]:
    return [(each.id, repr(each.logprob), each.end, each.alternatives) for each in tokens]


def masked(member: Any, tokens: Any, ids: list[int], given: dict[str, Any]) -> Iterator[Token]:
    """Yields tokens of a request, and posts its masks if it has a grammar."""

    def post(position: int) -> None:
        if "grammar" in given:
            member.post_mask(position, mask_of(position))

    post(len(ids))
    for position, token in enumerate(tokens, len(ids) + 1):
        if not token.end:
            post(position)
        yield token


def executor_of(
    comm: kccl.Communicator, model: str, tuning: Tuning, warp_size: int, seats: int
) -> Any:
    settings: dict[str, Any] = {"context": CONTEXT, "slots": SEATS, "warp_size": warp_size}
    kind = DeviceExecutor if seats == 1 else BatchedDevice
    return kind(checkpoint(model), comm, tuning=replace(tuning, seats=seats), **settings)


def alone(
    model: str, asked: list[Any], tuning: Tuning = TUNING, warp_size: int = 32
) -> list[list[Any]]:
    def main(comm: kccl.Communicator) -> list[list[Any]]:
        executor, found = executor_of(comm, model, tuning, warp_size, 1), []
        for ids, given, _ in asked:
            executor.start(ids, SamplingParams(**given))
            found.append(told(list(masked(executor, executor.tokens(), ids, given))))
        return found

    return kccl.run_threads(main, 1, backend="sim", seed=1, warp_size=warp_size)[0]


def together(
    model: str,
    asked: list[Any],
    ranks: int = 1,
    tuning: Tuning = TUNING,
    warp_size: int = 32,
    seed: int = 1,
) -> list[list[Any]]:
    """The answers of requests each of which joins while the one before it runs."""

    def answers(executor: BatchedDevice) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in asked]
        free, errors = list(range(SEATS)), []
        changed = threading.Condition()

        def ask(i: int) -> None:
            ids, given, behind = asked[i]
            with changed:
                changed.wait_for(
                    lambda: errors or (free and (i == 0 or len(found[i - 1]) >= behind))
                )
                if errors:
                    return
                slot = free.pop()
            member = executor.join(ids, SamplingParams(**given), Place(slot, slot, 0))
            for token in masked(member, member.tokens(), ids, given):
                with changed:
                    found[i].append(token)
                    changed.notify_all()
            member.leave()
            with changed:
                free.append(slot)
                changed.notify_all()

        def run(i: int) -> None:
            try:
                ask(i)
            except BaseException as error:
                with changed:
                    errors.append(error)
                    changed.notify_all()

        threads = [threading.Thread(target=run, args=(i,)) for i in range(len(asked))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        for error in errors:
            raise error
        return [told(tokens) for tokens in found]

    def main(comm: kccl.Communicator) -> list[list[Any]]:
        executor = executor_of(comm, model, tuning, warp_size, SEATS)
        executor.start_batch()
        try:
            return answers(executor) if comm.rank == 0 else []
        finally:
            executor.end() if comm.rank == 0 else executor.wait()

    return kccl.run_threads(main, ranks, backend="sim", seed=seed, warp_size=warp_size)[0]


def test_requests_together_have_the_tokens_that_they_have_alone():
    assert together("tiny-llama", SHORTER) == alone("tiny-llama", SHORTER)


def test_requests_share_token_steps():
    def main(comm: kccl.Communicator) -> int:
        executor = executor_of(comm, "tiny-llama", TUNING, 32, SEATS)
        executor.start_batch()
        before = executor._mailbox.token_steps
        params = SamplingParams(max_tokens=8)
        # Nobody is admitted before both wait.
        with executor._changed:
            places = [Place(slot, slot, 0) for slot in range(2)]
            members = [executor.join([5 + place.slot], params, place) for place in places]
        for member in members:
            list(member.tokens())
            member.leave()
        executor.end()
        return executor._mailbox.token_steps - before

    # The first one joins, and makes a token. Then the second one joins. They make seven tokens
    # together, and the second one makes its last. One after the other they would take 16.
    (steps,) = kccl.run_threads(main, 1, backend="sim", seed=1, warp_size=32)
    assert steps == 9


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "ranks", "tuning", "warp_size"),
    [
        ("tiny-laneformer", 2, replace(TUNING, kv_splits=2), 32),
        ("tiny-llama", 1, replace(MERGING, **CHUNKS), 64),
    ],
)
def test_more_requests_than_seats(model, ranks, tuning, warp_size):
    found = together(model, REQUESTS, ranks, tuning, warp_size)
    assert found == alone(model, REQUESTS, tuning, warp_size)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "blocks"), [("tiny-laneformer", 4), ("tiny-laneformer of 2", SEATS - 1)]
)
def test_blocks_share_the_mean_of_the_residuals(model, blocks):
    """Where there are fewer blocks than requests, each block computes all of it."""
    tuning = replace(TUNING, blocks=blocks)
    assert together(model, SHORT, tuning=tuning) == alone(model, SHORT, tuning)


@pytest.mark.long
def test_a_request_whose_mask_comes_late_is_left_out(kernels, monkeypatch):
    post_mask = DeviceMember.post_mask

    def post_late(member: DeviceMember, position: int, words: Any) -> None:
        end = time.monotonic() + 60
        while member.number not in member._batch._left_out and time.monotonic() < end:
            time.sleep(0.01)
        assert member.number in member._batch._left_out
        post_mask(member, position, words)

    expected = alone("tiny-llama", SHORT)
    monkeypatch.setattr(DeviceMember, "post_mask", post_late)
    text, patience = (kernels / "mask.cuh").read_text(), "kMaskPatienceNs = 1000000;"
    assert text.count(patience) == 1
    (kernels / "mask.cuh").write_text(text.replace(patience, "kMaskPatienceNs = 2000;"))
    assert together("tiny-llama", SHORT) == expected


# File -> text that is there once, and what takes its place: bugs that the simulator must find.
BUGS = {
    "a column reads another one's slot": (
        "attend_seats.cuh",
        "task_of<S>(consumer_.task(), column);",
        "task_of<S>(consumer_.task(), 0 * column);",
    ),
    "a request is sampled as another one": (
        "sample.cuh",
        "task_(task_of<S>(consumer.task(), column))",
        "task_(task_of<S>(consumer.task(), 0))",
    ),
    "columns share the slots of their choices": (
        "exchange_buffer.cuh",
        "return kSeatWords + column * (kMeetings",
        "return kSeatWords + 0 * column * (kMeetings",
    ),
    "rounds forget the numbers of exchanges": (
        "choosers.cuh",
        "counts >> 2 * i & 3u",
        "0 * counts",
    ),
    "all columns turn by one position": (
        "decode.cuh",
        "position_of<S>(consumer.task(), position, column)}",
        "position_of<S>(consumer.task(), position, 0)}",
    ),
    "all columns run one token": (
        "consumer_warp.cuh",
        "ids + task.start : &shared_.tokens[column]",
        "ids + task.start : &shared_.tokens[0]",
    ),
    "each round counts the answer's ids anew": (
        "scores.cuh",
        "if (task.start < task.num_ids) begin_text",
        "begin_text",
    ),
    "shares of the mean are read without an acquire": (
        "head_mean.cuh",
        "mem::fence<mem::Order::kAcquire, mem::Scope::kDevice>();",
        "",
    ),
    "warps overwrite sums that others still read": (
        "consumer_warp.cuh",
        "if constexpr (kAreas<S> == 1) (void)meet();",
        "",
    ),
}


@pytest.mark.parametrize("bug", hunted(BUGS))
def test_the_simulator_finds_planted_bugs(bug, kernels):
    name, right, wrong = BUGS[bug]
    text = (kernels / name).read_text()
    assert text.count(right) == 1
    # Only a Laneformer has a mean of residuals.
    model = "tiny-laneformer" if name == "head_mean.cuh" else "tiny-llama"
    expected = alone(model, SHORT)
    (kernels / name).write_text(text.replace(right, wrong))
    for seed in range(12):
        try:
            found = together(model, SHORT, seed=seed)
        except kccl.CompileError:
            raise
        except kccl.Error:
            return
        if found != expected:
            return
    pytest.fail("12 seeds did not show it")


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("tiny-qwen3-moe", {}, "slots is 2, must be 1 for a mixture of experts"),
        ("tiny-llama", {"weights_in_registers": True}, "must be 1 for weights in registers"),
    ],
    ids=str,
)
def test_what_has_no_seats_is_refused(model, change, message):
    program = Program(random_checkpoint(model).config)
    with pytest.raises(kccl.InvalidArgument, match=message):
        check_requests(program, replace(TUNING, **change), 2)
