"""The host executor against the reference, and against itself on other numbers of ranks."""

import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from long import long_after, long_beyond_each

import kccl
from kccl.engine import Engine, SamplingParams
from kccl.engine.base.core import ffi, lib
from kccl.engine.diff import TOLERANCES, Diff
from kccl.engine.executors.reference import Reference
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.experts import Experts
from kccl.engine.model.sample import alternatives, sample
from kccl.engine.model.structs import sampling_of

# Sizes that fill no panel, no vector and no group of columns, and one lane of many.
ODD = {"hidden": 70, "ffn": 84, "head_dim": 10, "vocab_size": 203}
CASES = {
    "laneformer": ("tiny-laneformer", {}),
    "odd laneformer": ("tiny-laneformer", ODD),
    "early communication": ("tiny-laneformer", {"early_comm": True}),
    "late messages": ("tiny-laneformer", {"early_messages": False}),
    "no attention messages": ("tiny-laneformer", {"attention_comm": False}),
    "delay 1": ("tiny-laneformer", {"delay": 1, "message_dtype": "float32"}),
    "delay 0": ("tiny-laneformer", {"delay": 0}),
    "vocab parallel": ("tiny-laneformer", {"lm_head": "vocab_parallel", "vocab_size": 200}),
    "llama": ("tiny-llama", {}),
    "odd llama": ("tiny-llama", ODD | {"num_heads": 6, "num_lanes": 3, "is_tied": False}),
    "qwen3": ("tiny-qwen3", {}),
    "qwen2": ("tiny-qwen2", {}),
    "mistral": ("tiny-mistral", {}),
    "odd biases": (
        "tiny-llama",
        ODD | {"num_heads": 6, "num_lanes": 3, "biases": ("qkv", "out", "gate_up", "down")},
    ),
    "biases and norms of heads": ("tiny-qwen3", {"biases": ("qkv", "out")}),
    "windows of 1 between others": ("tiny-qwen3", {"window": 1, "window_layers": (0, 2)}),
    "experts": ("tiny-qwen3-moe", {}),
    "experts whose weights add up to less than 1": (
        "tiny-qwen3-moe",
        {"experts": Experts(num=5, chosen=2, is_normalised=False)},
    ),
    "all of the experts": ("tiny-qwen3-moe", {"experts": Experts(num=4, chosen=4)}),
    "odd experts": (
        "tiny-gpt-oss",
        ODD | {"num_heads": 6, "num_kv_heads": 3, "num_lanes": 3, "swiglu_limit": 0.5},
    ),
    "gpt-oss": ("tiny-gpt-oss", {}),
    "a window in the last layer": ("tiny-llama", {"window": 9, "window_layers": (2,)}),
}


def checkpoint_of(case):
    model, changes = CASES[case]
    return random_checkpoint(model, **changes)


def ids_for(checkpoint, length=45, seed=0):
    vocab_size = checkpoint.config.vocab_size
    return np.random.default_rng(seed).integers(vocab_size, size=length).tolist()


# ---- Numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_op_is_the_references(case):
    checkpoint = checkpoint_of(case)
    # More ids than one pass takes.
    with Engine(checkpoint, ranks=2, blocks=2) as engine:
        differences = list(Diff(checkpoint, engine, ids_for(checkpoint)).all())
    assert len(differences) == len(Reference(checkpoint).program.ops)
    tolerance = TOLERANCES[checkpoint.config.message_dtype]
    assert max(each.relative for each in differences) < tolerance


# `make test` runs these: an odd size needs whatever an even one needs.
ODD = ("odd laneformer", "vocab parallel", "odd llama", "odd biases", "odd experts")


@pytest.mark.parametrize(
    "case", long_after(6, [*ODD, "windows of 1 between others", "laneformer", "experts"])
)
def test_any_number_of_ranks_and_blocks_gives_the_same_bits(case):
    checkpoint, logits = checkpoint_of(case), []
    some = (3, 2) if checkpoint.config.num_lanes == 3 else (4, 1)
    for ranks, blocks in ((1, 1), (1, 3), some, (8, 1)):
        with Engine(checkpoint, ranks=ranks, blocks=blocks) as engine:
            logits.append(engine.logits(ids_for(checkpoint)).view(np.uint32))
    for each in logits[1:]:
        assert (each == logits[0]).all()


@pytest.mark.long
@pytest.mark.parametrize("model", ["tiny-laneformer", "tiny-llama"])
def test_two_thousand_tokens_are_the_same_on_any_number_of_ranks(model):
    checkpoint = random_checkpoint(model, context=2048, num_layers=3, window=0, window_layers=0)
    found = []
    for ranks in (1, 2, 4, 8):
        with Engine(checkpoint, ranks=ranks, blocks=1) as engine:
            answer = engine.generate(
                [1, 2, 3], temperature=1.0, max_tokens=2000, seed=7, logprobs=True
            )
            # Decoding is compared bit for bit.
            found.append((answer.ids, np.array(answer.logprobs).tobytes()))
    assert len(found[0][0]) == 2000
    for each in found[1:]:
        assert each == found[0]


@pytest.mark.parametrize("case", ["odd laneformer", "odd experts"])
def test_decoding_and_prefill_give_the_same_bits(case):
    checkpoint = checkpoint_of(case)
    with Engine(checkpoint, ranks=2, blocks=1) as engine:
        answer = engine.generate(ids_for(checkpoint, 5), max_tokens=60, logprobs=True)
        whole = [*ids_for(checkpoint, 5), *answer.ids]
        rows = engine.logits(whole).astype(np.float64)[4:-1]
        peaks = rows.max(-1)
        sums = np.log(np.exp(rows - peaks[:, None]).sum(-1))
        chosen = rows[np.arange(60), answer.ids] - peaks - sums
    assert np.abs(np.array(answer.logprobs) - chosen).max() < 1e-12


CHOSEN = [
    {},
    {"temperature": 0.8, "seed": 5},
    {
        **{"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
        **{"repetition_penalty": 1.3, "seed": 2**64 - 1},
    },
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {7: 2.0, 9: -50.0}},
]


@pytest.mark.parametrize(("given", "length"), long_beyond_each(CHOSEN, [10, 70]))
def test_tokens_are_the_references(given, length):
    # FP32 messages: roundings to BF16 that fall differently could change a token.
    checkpoint = random_checkpoint("tiny-laneformer", message_dtype="float32")
    # One pass, and three, of which only the last goes on behind the keys of the last layer.
    ids, params = ids_for(checkpoint, length), SamplingParams(max_tokens=40, **given)
    expected = [token for token, _ in Reference(checkpoint).generate(ids, params)]
    with Engine(checkpoint, ranks=2, blocks=1) as engine:
        assert engine.generate(ids, params).ids == expected
        # Again, now with most of the prompt in the cache; then with a prompt that parts early.
        assert engine.generate(ids, params).ids == expected
        engine.generate(ids_for(checkpoint, 12, seed=1), max_tokens=3)
        assert engine.generate(ids, params).ids == expected


@given(
    st.integers(1, 300),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 7]),
    st.sampled_from([1.0, 0.9, 0.2]),
    st.sampled_from([0.0, 0.2, 1.0]),
    st.sampled_from([1.0, 1.5]),
    st.sampled_from([{}, {"presence_penalty": 0.7}, {"frequency_penalty": -1.1}]),
    st.sampled_from([0, 1, 20]),
    st.sampled_from([None, 0.02, 0.5, 1.0]),
)
@settings(max_examples=200, deadline=None)
def test_the_sampler_is_the_oracles(
    vocab_size, seed, temperature, top_k, top_p, min_p, penalty, penalties, most, share
):
    rng = np.random.default_rng(seed)
    logits = np.round(rng.standard_normal(vocab_size) * 4, 1).astype(np.float32)
    # Some of the answer's ids twice.
    history, num_prompt = rng.integers(min(vocab_size, 5), size=9).tolist(), seed % 10
    biased = {int(each): float(rng.standard_normal()) for each in rng.integers(vocab_size, size=3)}
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
        logit_bias=biased if seed % 2 else {},
        **penalties,
    )
    request = ffi.new("KcclEngineRequest *")
    request.sampling = sampling_of(replace(params, logprobs=True))
    request.presence_penalty = params.presence_penalty
    request.frequency_penalty = params.frequency_penalty
    bias_ids = ffi.new("int32_t[]", [token for token, _ in params.biases])
    biases = ffi.new("double[]", [bias for _, bias in params.biases])
    request.num_biases, request.num_ids = len(params.biases), num_prompt
    request.bias_ids = int(ffi.cast("uintptr_t", bias_ids))
    request.biases = int(ffi.cast("uintptr_t", biases))
    request.num_alternatives = most
    logprob = ffi.new("double *")
    words, mask = None, ffi.NULL
    if share is not None:
        # Bits beyond the vocabulary count for nothing.
        bits = rng.random(-(-vocab_size // 32) * 32) < share
        bits[seed % vocab_size] = True
        words = np.packbits(bits, bitorder="little").view(np.uint32)
        mask = ffi.from_buffer("uint32_t[]", words)
    found = lib.kccl_engine_sample(
        *(ffi.from_buffer("float[]", logits), vocab_size, request, 9, history, 9, mask, logprob),
        others := ffi.new("KcclEngineAlternative[20]"),
    )
    expected, expected_logprob = sample(logits, params, 9, history, num_prompt, words)
    assert found == expected
    assert words is None or bits[found]
    wanted = alternatives(logits, most)
    assert [each.id for each in others][: len(wanted)] == [token for token, _ in wanted]
    found_logprobs = [each.logprob for each in others][: len(wanted)]
    assert found_logprobs == pytest.approx([value for _, value in wanted], abs=1e-12)
    assert logprob[0] == pytest.approx(expected_logprob, abs=1e-12)


def test_each_token_comes_with_the_likeliest_ones():
    """On every rank; and the token's own log-probability is the same number."""
    body = random_checkpoint("tiny-laneformer")
    with Engine(body, ranks=2, blocks=1) as engine:
        pieces = list(engine.stream([1, 2, 3], max_tokens=8, logprobs=True, top_logprobs=5))
        rows = engine.logits([1, 2, 3, *(piece.id for piece in pieces)])[2:-1]
        engine._ranks.mine.reverse()
        of_rank_1 = list(engine.stream([1, 2, 3], max_tokens=8, logprobs=True, top_logprobs=5))
        engine._ranks.mine.reverse()
    assert [piece.alternatives for piece in of_rank_1] == [piece.alternatives for piece in pieces]
    for piece, row in zip(pieces, rows, strict=True):
        assert piece.alternatives[0] == (piece.id, piece.logprob)
        wanted = alternatives(row, 5)
        assert [token for token, _ in piece.alternatives] == [token for token, _ in wanted]


# ---- Ends --------------------------------------------------------------------------------------


def test_an_answer_ends_where_it_must():
    checkpoint = random_checkpoint("tiny-llama", context=24)
    with Engine(checkpoint, blocks=1) as engine:
        free = engine.generate([1, 2, 3], max_tokens=8)
        assert (len(free.ids), free.end, free.num_prompt) == (8, "max_tokens", 3)
        full = engine.generate([1, 2, 3], max_tokens=100)
        assert (len(full.ids), full.end) == (21, "context")
        stop = free.ids[4]
        ended = engine.generate([1, 2, 3], max_tokens=100, stop_ids=(stop,))
        assert ended.end == "stop"
        assert ended.ids == free.ids[: free.ids.index(stop) + 1]


def test_an_answer_can_be_given_up_at_any_token():
    checkpoint = checkpoint_of("laneformer")
    ids = ids_for(checkpoint, 4)
    with Engine(checkpoint, ranks=2, blocks=1) as engine:
        expected = engine.generate(ids, max_tokens=30).ids
        for taken in range(1, 12):
            pieces = engine.stream(ids, max_tokens=30)
            assert [next(pieces).id for _ in range(taken)] == expected[:taken]
            pieces.close()
        assert engine.generate(ids, max_tokens=30).ids == expected


def test_one_request_at_a_time():
    checkpoint = checkpoint_of("llama")
    with Engine(checkpoint, blocks=1) as engine:
        pieces = engine.stream([1], max_tokens=5)
        next(pieces)
        with pytest.raises(kccl.InvalidArgument, match="answering another request"):
            engine.logits([1])
        pieces.close()
        assert engine.logits([1]).shape == (1, 256)
    with pytest.raises(kccl.InvalidArgument, match="closed"):
        engine.logits([1])


@pytest.mark.parametrize(
    ("prompt", "given", "message"),
    [
        ([], {}, "empty"),
        ([1, 256], {}, "id 256, must be from 0 to 255"),
        ([-1], {}, "id -1"),
        ([1.5], {}, r"^an id of the prompt is 1\.5, must be an integer"),
        (["1"], {}, "^an id of the prompt is '1', must be an integer"),
        ([{"role": "user"}], {}, r"has messages, must be text or ids: engine\.tokenizer\.chat\("),
        (b"1", {}, "^the prompt is of type bytes, must be text or ids"),
        (1, {}, "^the prompt is of type int, must be text or ids"),
        ([1] * 129, {}, "129 tokens, must have at most 127 in a context of 128"),
        ([1] * 128, {}, "128 tokens, must have at most 127 in a context of 128"),
        ([1], {"top_p": 1.5}, "top_p"),
        ([1], {"heat": 1}, "no parameter heat"),
        ([1], {"stop": ("a",)}, "must be empty: random weights of tiny-llama has no tokenizer"),
        ([1], {"params": SamplingParams(stop=("a",))}, "has no tokenizer"),
        ([1], {"temprature": 1}, r"there is no parameter temprature: did you mean temperature\?"),
        ([1], {"xyz": 1}, "there is no parameter xyz: must be one of temperature, top_k, "),
        (
            [1],
            {"logit_bias": {2000000000: 1.0}},
            "logit_bias has id 2000000000, must have ids from 0",
        ),
    ],
)
def test_bad_requests_are_refused(prompt, given, message):
    with Engine(checkpoint_of("llama"), blocks=1) as engine:
        # At the call, not at the first piece.
        with pytest.raises(kccl.InvalidArgument, match=message):
            engine.stream(prompt, **given)
        assert engine.generate([1], max_tokens=2).end == "max_tokens"


def test_logits_need_no_room_behind_the_prompt():
    with Engine(checkpoint_of("llama"), blocks=1) as engine:
        assert engine.logits([1] * 128).shape == (128, 256)
        with pytest.raises(kccl.InvalidArgument, match="129 tokens, must have at most 128 in a"):
            engine.logits([1] * 129)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "tpu"}, "backend is 'tpu'"),
        ({"backend": ["host"]}, r"backend is \['host'\]"),
        ({"ranks": 9}, "ranks is 9, must be from 1 to 8"),
        ({"ranks": "2"}, "ranks is '2', must be an integer"),
        ({"blocks": 0}, "blocks is 0"),
        ({"blocks": 1.5}, r"blocks is 1\.5, must be an integer"),
        ({"context": "9"}, "context is '9', must be an integer"),
        ({"context": 129}, "context is 129, must be from 1 to the model's, 128"),
        ({"context": 0}, "context is 0, must be from 1 to the model's, 128"),
    ],
)
def test_bad_engines_are_refused(given, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        Engine(checkpoint_of("llama"), **given)


# ---- Processes ---------------------------------------------------------------------------------

RANK = """
import sys
import kccl
from kccl.engine import Engine
from kccl.engine.files.random_weights import random_checkpoint

checkpoint = random_checkpoint("tiny-laneformer", context=4096)
with Engine(checkpoint, blocks=1) as engine:
    for number, piece in enumerate(engine.stream([1, 2, 3], max_tokens={tokens})):
        {body}
"""


def run_processes(ranks, body, tokens=40, **options):
    program = textwrap.dedent(RANK).format(tokens=tokens, body=body)
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "kccl",
            "run",
            "-n",
            str(ranks),
            "--",
            sys.executable,
            "-c",
            program,
        ],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"KCCL_TIMEOUT": "5"},
        **options,
    )


def test_processes_share_the_lanes():
    body = "print(piece.id) if engine.rank == 0 else None"
    with Engine(random_checkpoint("tiny-laneformer", context=4096), blocks=1) as engine:
        expected = engine.generate([1, 2, 3], max_tokens=40).ids
    # 4 lanes on 3 ranks.
    done = run_processes(3, body)
    assert done.returncode == 0, done.stderr
    assert [int(line) for line in done.stdout.split()] == expected


def test_a_killed_rank_is_named():
    body = f"import os; number == 9 and engine.rank and os.kill(os.getpid(), {signal.SIGKILL:d})"
    done = run_processes(2, body, tokens=4000)
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert "PeerLost" in done.stderr


def test_ranks_with_different_requests_are_told():
    program = textwrap.dedent(RANK).format(tokens="5 + engine.rank", body="pass")
    command = [sys.executable, "-m", "kccl", "run", "-n", "2", "--", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "the ranks make different requests" in done.stderr
