"""What a drafter in Python may do wrong, and what becomes of the engine then."""

import ctypes
import gc
import subprocess
import sys
import threading
import time
from itertools import count

import preloaded
import pytest
from drafting import knows, tokens_of, told
from long import long_after

import kccl
from kccl.engine import Drafts, Engine, SamplingParams
from kccl.engine.executors.cancellation import Cancellation
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.drafts import OFF
from kccl.engine.model.executor import EndedElsewhere

PROMPT = [3, 1, 4, 1, 5]
GREEDY = {"max_tokens": 40}


@pytest.fixture(scope="module", params=[("tiny-laneformer", 2, 1), ("tiny-llama", 1, 2)], ids=str)
def engine(request):
    model, num, blocks = request.param
    with Engine(random_checkpoint(model, context=112), ranks=num, blocks=blocks) as engine:
        yield engine


@pytest.fixture(scope="module")
def llama():
    with Engine(random_checkpoint("tiny-llama", context=320), blocks=1) as engine:
        yield engine


# ---- What it returns or raises -----------------------------------------------------------------


def test_a_drafter_can_cancel(engine):
    plain = [each.id for each in tokens_of(engine, OFF, PROMPT, **GREEDY)]
    cancellation = Cancellation()
    knowing = knows(PROMPT, plain)

    def draft(ids, most):
        if len(ids) > 20 and not cancellation.is_asked:
            # Another thread asks, as a server's does: the executor's thread never waits for one.
            thread = threading.Thread(target=cancellation.ask)
            thread.start()
            thread.join()
        return knowing(ids, most)

    engine._runner.drafts = Drafts(drafter=draft)
    read = []
    with pytest.raises(EndedElsewhere):
        for token in engine._runner.tokens(
            PROMPT, SamplingParams(**GREEDY), cancellation=cancellation
        ):
            read.append(token.id)
    assert 0 < len(read) < 40
    assert read == plain[: len(read)]
    found = tokens_of(engine, Drafts(), [*PROMPT, *read], **GREEDY | {"max_tokens": 9})
    assert [each.id for each in found] == plain[len(read) : len(read) + 9]


@pytest.mark.parametrize(
    ("drafter", "error", "message"),
    [
        (lambda ids, most: 1 // 0, ZeroDivisionError, "division"),
        (lambda ids, most: [-1], kccl.InvalidArgument, "returned id -1, must be from 0 to"),
        (lambda ids, most: ["a"], kccl.InvalidArgument, "returned id 'a', must be from 0 to"),
        (lambda ids, most: [10**6], kccl.InvalidArgument, "returned id 1000000, must be"),
        (lambda ids, most: [1] * 9, kccl.InvalidArgument, "more than 7 ids, must return at"),
        (lambda ids, most: count(), kccl.InvalidArgument, "more than 7 ids, must return at"),
        (lambda ids, most: 5, kccl.InvalidArgument, "returned 5, must return a sequence of ids"),
        (lambda ids, most: None, kccl.InvalidArgument, "returned None, must return a sequence"),
        (lambda ids, most: next(iter(())), kccl.Error, "the drafter raised StopIteration"),
    ],
)
def test_a_drafter_that_fails_fails_the_request(llama, drafter, error, message):
    plain = tokens_of(llama, OFF, PROMPT, **GREEDY, logprobs=True)
    with pytest.raises(error, match=message):
        tokens_of(llama, Drafts(drafter=drafter), PROMPT, **GREEDY)
    # The next request knows nothing of it.
    assert llama.logits(PROMPT).shape[0] == len(PROMPT)
    assert told(tokens_of(llama, OFF, PROMPT, **GREEDY, logprobs=True)) == told(plain)


@pytest.mark.parametrize(
    "fields",
    [{"most": 8}, {"adapts": 1}, {"drafter": 5}, {"prediction": 5}, {"prediction": [1, -1]}],
    ids=str,
)
def test_wrong_fields_are_refused(fields):
    ((name, _),) = fields.items()
    with pytest.raises(kccl.InvalidArgument, match=f"^{name.replace('most', 'drafts')} is "):
        Drafts(**fields)


def test_predicted_ids_that_the_model_does_not_have_are_refused(llama):
    with pytest.raises(kccl.InvalidArgument, match=r"prediction has id 1000000, must be below \d"):
        tokens_of(llama, Drafts(prediction=[1, 10**6]), PROMPT, **GREEDY)


# ---- What it does to its thread ----------------------------------------------------------------


def test_rounding_that_a_drafter_changes_is_restored(llama):
    given = GREEDY | {"logprobs": True}
    plain = tokens_of(llama, OFF, PROMPT, **given)
    libm = ctypes.CDLL("libm.so.6")

    def draft(ids, most):
        # Upwards.
        assert libm.fesetround(0x800) == 0
        return []

    assert told(tokens_of(llama, Drafts(drafter=draft), PROMPT, **given)) == told(plain)


def test_nothing_is_collected_while_a_drafter_runs(llama):
    was_enabled = []

    def draft(ids, most):
        was_enabled.append(gc.isenabled())
        return []

    assert gc.isenabled()
    tokens_of(llama, Drafts(drafter=draft), PROMPT, **GREEDY)
    assert set(was_enabled) == {False}
    assert gc.isenabled()
    gc.disable()
    try:
        tokens_of(llama, Drafts(drafter=draft), PROMPT, **GREEDY)
        assert not gc.isenabled()
    finally:
        gc.enable()


# Faults here would end this process, or hang it.
ABUSE = """
import gc, threading, time
import kccl
from kccl.engine import Drafts, Engine, Grammar
from kccl.engine.executors.host import HostExecutor
from kccl.engine.files.models import BUNDLED

# The thread that makes masks is late, so it could take a token of the request after its own.
tokens = HostExecutor.tokens

def tokens_late(executor):
    for token in tokens(executor):
        yield token
        if threading.current_thread().name == "kccl grammar":
            time.sleep(0.03)

HostExecutor.tokens = tokens_late
engine = Engine(BUNDLED, ranks={world_size}, blocks=1, context=128)
given = dict(max_tokens=60, temperature=0)
plain = engine.generate("def f(x):", **given).ids

def close(ids, most):
    engine.close()

engine._runner.drafts = Drafts(3, drafter=close)
for answer in (engine.generate, lambda *a, **b: list(engine.submit(*a, **b))):
    try:
        answer("def f(x):", **given)
    except kccl.Error as error:
        print(error)

is_abandoned = threading.Event()
found = []

def collect(ids, most):
    assert is_abandoned.wait(60)
    found.append(gc.collect())
    return []

gc.disable()
for grammar in (None, Grammar.regex("[a-f]{{50,60}}")):
    is_abandoned.clear()
    found.clear()
    engine._runner.drafts = Drafts(3, drafter=collect)
    stream = engine.stream("def f(x):", **given, grammar=grammar)
    next(stream)
    # Only a collection finds a cycle.
    abandoned = [stream]
    abandoned.append(abandoned)
    del stream, abandoned
    is_abandoned.set()
    while not found:
        time.sleep(0.005)
    engine._runner.drafts = Drafts(3, drafter=lambda ids, most: [])
    print(engine.generate("def f(x):", **given).ids == plain)
engine.close()
print("closed")
"""


@pytest.mark.parametrize("world_size", long_after(1, [2, 1]))
def test_a_drafter_neither_closes_nor_waits_for_its_engine(world_size):
    program = ABUSE.format(world_size=world_size)
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False
    )
    refused = "a drafter cannot close its engine"
    wanted = [refused, refused, "True", "True", "closed"]
    assert (ran.returncode, ran.stdout.splitlines()) == (0, wanted), ran.stderr


@pytest.mark.long
def test_an_error_names_the_drafter_that_took_too_long():
    with Engine(random_checkpoint("tiny-laneformer"), ranks=2, blocks=1) as engine:
        for each in engine._ranks.mine:
            each._comm.timeout = 2

        def draft(ids, most):
            time.sleep(4)
            return []

        with pytest.raises(
            kccl.Timeout, match=r"the drafter took .* s, must return within KCCL_TI"
        ):
            tokens_of(engine, Drafts(drafter=draft), PROMPT, **GREEDY)


# ---- Several processes -------------------------------------------------------------------------

JOB = """
from kccl.engine import Drafts, Engine
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.drafts import OFF
from drafting import knows, told, tokens_of

prompt = [3, 1, 4, 1, 5]
given = dict(max_tokens=30, temperature=0.8, seed=3, logprobs=True, top_logprobs=2)
raised, rank = [], int(os.environ["KCCL_RANK"])
with Engine(random_checkpoint("tiny-laneformer", context=112), blocks=2) as engine:
    plain = tokens_of(engine, OFF, prompt, **given)
    knowing = knows(prompt, [each.id for each in plain], errors={4, 11})
    accepted, are_same = [], True
    for drafts in (Drafts(), Drafts(adapts=True), Drafts(7, drafter=knowing)):
        are_same &= told(tokens_of(engine, drafts, prompt, **given)) == told(plain)
        accepted.append(engine.drafted.accepted)

    def breaks(ids, most):
        if len(ids) > 9:
            raise RuntimeError("the drafter broke")
        return [1]

    for drafts in (Drafts(3 + rank), Drafts(3, drafter=breaks)):
        try:
            tokens_of(engine, drafts, prompt, **given)
        except Exception as error:
            raised.append(type(error).__name__)
    are_same &= told(tokens_of(engine, OFF, prompt, **given)) == told(plain)
say(rank=rank, are_same=are_same, accepted=accepted, raised=raised)
"""


def test_drafts_of_a_job_of_processes():
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    code, said, err = preloaded.run(
        2, path + JOB, timeout=180, KCCL_TIMEOUT="90", KCCL_FIRST_TIMEOUT="90"
    )
    assert code == 0, err
    assert [said[rank]["are_same"] for rank in range(2)] == [True, True]
    assert said[0]["accepted"] == said[1]["accepted"]
    # 29 tokens follow on the prompt's, in passes of up to eight.
    assert said[0]["accepted"][2] > 20
    assert said[0]["raised"] == ["InvalidArgument", "RuntimeError"]
    assert said[1]["raised"] == ["InvalidArgument", "EndedElsewhere"]
