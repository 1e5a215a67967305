import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kccl
from kccl.engine import Engine
from kccl.engine.files.random_weights import random_checkpoint
from kccl.engine.model.sample import SamplingParams, alternatives, gumbel, kept_ids, philox, sample
from kccl.engine.monokernel.compiled import check_sampling

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], np.float32))


def logits_of(shares):
    return np.log(np.array(shares, np.float32))


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [
        # Known answers, published with the generator (Random123, kat_vectors).
        ((0, 0), (0, 0, 0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 4, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_words(key, counter, words):
    assert " ".join(f"{int(word):08x}" for word in philox(key, counter)) == words


def test_noise_depends_on_seed_position_and_id_alone():
    everywhere = gumbel(5, 7, np.arange(1000))
    some = np.array([998, 3, 41, 40])
    assert (gumbel(5, 7, some) == everywhere[some]).all()
    assert np.unique(everywhere).size == 1000
    for other in (gumbel(6, 7, np.arange(1000)), gumbel(5, 8, np.arange(1000))):
        assert (other != everywhere).all()
    # The seed's high half counts, too.
    assert (gumbel(5 + (1 << 32), 7, some) != everywhere[some]).all()


def test_noise_by_hand():
    """Word 2 of counter (0, 0) for key 0, which Random123 publishes, is the noise of token 2."""
    u = (0xBC57AC4C + 0.5) / 2**32
    assert gumbel(0, 0, np.array([2]))[0] == pytest.approx(-math.log(-math.log1p(-u)), rel=1e-15)


def test_tokens_are_drawn_by_their_probabilities():
    params = SamplingParams(temperature=1.0, seed=11)
    drawn = [sample(LOGITS, params, position, [])[0] for position in range(4000)]
    shares = np.bincount(drawn, minlength=5) / 4000
    # Five standard deviations of the likeliest.
    np.testing.assert_allclose(shares, np.exp(LOGITS), atol=0.04)


def check_numbers(right, wrong):
    for value in right:
        given = SamplingParams(temperature=value).temperature
        assert type(given) is float and given == 0.5
    for value in wrong:
        with pytest.raises(kccl.InvalidArgument, match=r"^temperature is "):
            SamplingParams(temperature=value)


def test_numbers_of_other_kinds():
    check_numbers((Fraction(1, 2), Decimal("0.5"), np.float16(0.5)), (np.array([0.5]), 1j))


@pytest.mark.long
def test_numbers_of_pytorch():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    check_numbers([torch.tensor(0.5)], (torch.tensor(True), torch.tensor([0.5])))


def test_temperature_sharpens():
    params = SamplingParams(temperature=0.5, seed=3)
    drawn = [sample(LOGITS, params, position, [])[0] for position in range(4000)]
    squared = np.exp(2 * LOGITS.astype(np.float64))
    shares = np.bincount(drawn, minlength=5) / 4000
    np.testing.assert_allclose(shares, squared / squared.sum(), atol=0.04)


def test_greedy_takes_the_lowest_of_equal_ids():
    params = SamplingParams(top_k=1, top_p=0.1, min_p=1.0)
    assert sample(np.array([1, 5, 5, 2], np.float32), params, 0, [])[0] == 1


def test_the_log_probability_is_the_models():
    """Whatever the parameters that chose the token."""
    params = SamplingParams(temperature=3.0, top_k=1, repetition_penalty=1.2)
    token, logprob = sample(LOGITS + np.float32(50), params, 0, [3])
    assert token == 1
    assert logprob == pytest.approx(math.log(0.4), abs=1e-5)


@pytest.mark.parametrize(
    ("shares", "params", "kept"),
    [
        ([0.1, 0.4, 0.05, 0.3, 0.15], {}, [0, 1, 2, 3, 4]),
        ([0.1, 0.4, 0.05, 0.3, 0.15], {"top_k": 2}, [1, 3]),
        ([0.1, 0.4, 0.05, 0.3, 0.15], {"top_k": 9}, [0, 1, 2, 3, 4]),
        # Equal to the k-th largest.
        ([0.2, 0.4, 0.2, 0.2], {"top_k": 2}, [0, 1, 2, 3]),
        ([0.1, 0.4, 0.05, 0.3, 0.15], {"top_p": 0.39}, [1]),
        ([0.1, 0.4, 0.05, 0.3, 0.15], {"top_p": 0.41}, [1, 3]),
        ([0.1, 0.4, 0.05, 0.3, 0.15], {"top_p": 0.8}, [1, 3, 4]),
        # Where probabilities are equal, the lowest ids.
        ([0.25, 0.25, 0.25, 0.25], {"top_p": 0.49}, [0, 1]),
        ([1 / 512] * 512, {"top_p": 0.0194}, list(range(10))),
        ([0.1, 0.4, 0.05, 0.3, 0.15], {"min_p": 0.3}, [1, 3, 4]),
        ([0.1, 0.4, 0.05, 0.3, 0.15], {"min_p": 1.0}, [1]),
        # top_p counts what top_k has kept: 0.4 of 0.7 is more than half.
        ([0.1, 0.4, 0.05, 0.3, 0.15], {"top_k": 2, "top_p": 0.55}, [1]),
    ],
)
def test_filters(shares, params, kept):
    scores = logits_of(shares).astype(np.float64)
    assert kept_ids(scores, SamplingParams(temperature=1.0, **params)).tolist() == kept


def test_presence_and_frequency_count_the_answer_alone():
    logits = np.array([2.0, 1.5, 1.2, -1.0], np.float32)
    history = [0, 0, 0, 1, 1, 2]

    def chosen(num_prompt, **given):
        return sample(logits, SamplingParams(**given), 9, history, num_prompt)[0]

    assert chosen(None, presence_penalty=5.0) == 0
    assert chosen(6, frequency_penalty=5.0) == 0
    # Each id once: 0 and 1 lose the same.
    assert chosen(0, presence_penalty=1.0) == 0
    # 2 - 0.9, 1.5 - 0.6, 1.2 - 0.3.
    assert chosen(0, frequency_penalty=0.3) == 0
    # The answer is 1, 1, 2: 1.5 - 2 * 0.6; a negative one makes them likelier.
    assert chosen(3, frequency_penalty=-0.6) == 1


def test_a_bias_is_added_before_all_else():
    logits = np.array([2.0, 1.5, -1.0], np.float32)
    assert sample(logits, SamplingParams(logit_bias={2: 4.0}), 0, [])[0] == 2
    # 3 / 2 is less than 2.
    params = SamplingParams(logit_bias={2: 4.0}, repetition_penalty=2.0)
    assert sample(logits, params, 0, [2])[0] == 0
    _, logprob = sample(logits, SamplingParams(logit_bias=[(2, 4)]), 0, [])
    assert logprob == pytest.approx(alternatives(logits, 3)[2][1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"presence_penalty": math.nan}, r"^presence_penalty is nan, must be from -1e\+06 to"),
        ({"frequency_penalty": "a"}, "^frequency_penalty is 'a', must be from"),
        ({"logit_bias": {-1: 0.0}}, r"^logit_bias is \{-1: 0.0\}, must be ids and a number"),
        ({"logit_bias": {1: math.inf}}, "^logit_bias is "),
        ({"logit_bias": [1]}, "^logit_bias is "),
        ({"top_logprobs": 21, "logprobs": True}, "^top_logprobs is 21, must be an integer from 0"),
        ({"top_logprobs": 2}, "^top_logprobs is 2, must be 0 if logprobs is False"),
    ],
)
def test_wrong_penalties_and_biases(given, message):
    with pytest.raises(kccl.InvalidArgument, match=message):
        SamplingParams(**given)


def test_what_the_kernel_lacks_is_refused_by_name():
    check_sampling(SamplingParams(stop_ids=range(64)))
    with pytest.raises(kccl.InvalidArgument, match=r"^stop_ids has 65 ids, must have at most 64"):
        check_sampling(SamplingParams(stop_ids=range(65)))


def test_a_repeated_token_is_less_likely_whatever_its_sign():
    logits = np.array([2.0, 1.5, -1.0, -1.5], np.float32)
    greedy = SamplingParams(repetition_penalty=2.0)
    assert sample(logits, greedy, 0, [])[0] == 0
    assert sample(logits, greedy, 0, [0, 0])[0] == 1
    assert sample(logits - 3, greedy, 0, [0])[0] == 1
    # The penalty comes before the filters.
    params = SamplingParams(repetition_penalty=2.0, temperature=1.0, top_k=1)
    assert sample(logits, params, 0, [0])[0] == 1


@settings(deadline=None)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    st.integers(0, 50),
    st.floats(0.01, 1),
    st.floats(0, 1),
)
def test_the_likeliest_token_is_always_kept(logits, top_k, top_p, min_p):
    logits = np.array(logits, np.float32)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = kept_ids(logits.astype(np.float64), params)
    assert logits.argmax() in kept
    assert (np.diff(kept) > 0).all()
    # What is left out is nowhere more likely than what is kept.
    left_out = np.delete(logits, kept)
    assert left_out.size == 0 or left_out.max() <= logits[kept].min()
    assert sample(logits, params, 3, [])[0] in kept


def test_tokens_that_are_ruled_out_are_never_drawn():
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], np.float32)
    params = SamplingParams(temperature=1.0, repetition_penalty=1.5)
    drawn = {sample(logits, params, position, [0, 1])[0] for position in range(50)}
    assert drawn == {1, 3}


@pytest.mark.parametrize("logits", [[0.0, np.nan], [-np.inf, -np.inf], [np.inf, 0.0]])
def test_logits_that_are_not_numbers_are_refused(logits):
    with pytest.raises(kccl.Error, match="logits for position 9"):
        sample(np.array(logits, np.float32), SamplingParams(), 9, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, 1e-310, math.nan, math.inf, "1", True)),
        ("temperature", 10**400),
        *(("top_k", value) for value in (-1, 1.5, True, 2**32)),
        *(("top_p", value) for value in (0, 1.01, -1, math.nan, None)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan)),
        *(("repetition_penalty", value) for value in (0, -1, 1e-310, 1e7, math.nan)),
        *(("seed", value) for value in (-1, 2**64, 0.5, True, "1", np.float32(1))),
        *(("max_tokens", value) for value in (0, -1, 2.0, 2**32)),
        *(("stop_ids", value) for value in ((-1,), ("a",), 3, "3", [True], [2**31], [-1] * 999)),
        *(("stop", value) for value in ("", b"ab", 3, None, ("",), [1], ("\udcff",), "\udcff")),
        ("logprobs", 1),
        *((name, np.bool_(True)) for name in ("temperature", "top_k", "min_p", "seed")),
        *((name, np.float32("nan")) for name in ("temperature", "top_p", "repetition_penalty")),
        ("temperature", np.array([0.5, 0.6])),
    ],
)
def test_wrong_parameters_are_named(name, value):
    with pytest.raises(kccl.InvalidArgument, match=f"^{name} is .*, must be ") as told:
        SamplingParams(**{name: value})
    assert len(str(told.value)) < 200


def test_numbers_and_lists_may_be_of_numpy():
    """They are kept as Python's, so the ranks compare the same text."""
    given = SamplingParams(
        **{"temperature": np.float32(0.5), "top_k": np.int64(3), "top_p": np.float16(0.25)},
        **{"min_p": np.array(0.125), "repetition_penalty": np.longdouble(2), "seed": np.uint64(7)},
        **{"max_tokens": np.int8(9), "stop_ids": np.array([1, 2]), "stop": np.array(["a", "b"])},
        **{"logprobs": np.bool_(True)},
    )
    plain = SamplingParams(
        **{"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125, "seed": 7},
        **{"repetition_penalty": 2.0, "max_tokens": 9, "stop_ids": (1, 2), "stop": ("a", "b")},
        logprobs=True,
    )
    assert repr(given) == repr(plain)


def test_one_stop_string_may_stand_for_itself():
    assert SamplingParams(stop="ab").stop == ("ab",)
    assert SamplingParams(stop=["ab", "c"], stop_ids=[3]) == SamplingParams(
        stop=("ab", "c"), stop_ids=(3,)
    )


@pytest.mark.parametrize("penalty", [1e-6, 1e6])
def test_no_logit_overflows(penalty):
    """The largest that FP32 holds, one after the other as the likeliest."""
    most = np.finfo(np.float32).max
    for likeliest in range(3):
        logits = np.full(3, -most)
        logits[likeliest] = most
        params = SamplingParams(temperature=1e-6, repetition_penalty=penalty, top_p=0.9)
        assert sample(logits, params, 0, [0, 1, 2])[0] == likeliest


def test_a_number_that_python_does_not_print_is_one_line():
    with pytest.raises(kccl.InvalidArgument, match="an integer of too many digits, must be"):
        SamplingParams(max_tokens=10**5000)


def test_the_largest_parameters_are_taken():
    largest = SamplingParams(
        top_k=2**32 - 1, max_tokens=2**32 - 1, seed=2**64 - 1, stop_ids=(2**31 - 1,)
    )
    with Engine(random_checkpoint("tiny-llama", context=8), blocks=1) as engine:
        assert engine.generate([1], largest).end == "context"
