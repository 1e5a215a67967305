"""MXFP4's numbers, against gguf's and against the specification, a number at a time."""

import math

import gguf
import ml_dtypes
import numpy as np
import pytest

from kccl.engine.formats.mxfp4 import MXFP4

CODE = gguf.GGMLQuantizationType.MXFP4
SIZES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
NUMBERS = [*SIZES, *(-size for size in SIZES)]


def codes_of(words):
    """The codes of blocks of 17 bytes in the order of columns."""
    numbers = words.reshape(-1, 17)[:, 1:]
    return np.concatenate([numbers & 15, numbers >> 4], axis=1)


def words_of(scales):
    """A block for each scale, with every number twice."""
    numbers = np.arange(16, dtype=np.uint8) * 17
    return np.array([[scale, *numbers] for scale in scales], np.uint8)


def test_numbers_are_those_of_gguf_with_every_scale():
    """With the smallest, numbers are subnormal; with the largest, some are infinite."""
    words = words_of(range(255))
    with np.errstate(over="ignore"):
        wanted = gguf.quants.dequantize(words, CODE)
        by_hand = [np.float32(number * 2.0 ** (50 - 127)) for number in NUMBERS]
    found = MXFP4.to_float32(words.reshape(5, 51 * 17)).reshape(255, 32)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(found[50], by_hand * 2)
    assert (found[0, 1], found[1, 1]) == (2.0**-128, 2.0**-127)
    # BF16 has all of them.
    finite = words[:253]
    assert MXFP4.values(finite).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(MXFP4.values(finite).astype(np.float32), found[:253])


def test_a_scale_of_255_is_nan():
    assert np.isnan(MXFP4.to_float32(words_of([255]))).all()


def test_damaged_scales_are_found():
    usual = words_of([0, 1, 127, 252] * 5)
    assert MXFP4.is_finite(usual)
    for scale in (253, 254, 255):
        spoilt = usual.copy()
        spoilt[11, 0] = scale
        assert not MXFP4.is_finite(spoilt.reshape(4, -1))
    # 1.5 * 2^127 is a number of FP32.
    large = usual.copy()
    large[11] = [254, *[0xB3] * 16]
    assert MXFP4.is_finite(large)
    assert MXFP4.to_float32(large[11]).max() == 1.5 * 2.0**127
    assert MXFP4.is_finite(np.empty((0, 34), np.uint8))


def rounded(block):
    """The scale and the codes of numbers in double precision, by the specification."""
    most = max(abs(x) for x in block)
    exponent = max(math.frexp(most)[1] - 1 - 2, -127) if most else -127
    codes = []
    for x in block:
        size = abs(x) / 2.0**exponent
        nearest = min(range(8), key=lambda code: (abs(SIZES[code] - size), code % 2))
        codes.append(nearest + 8 * (math.copysign(1, x) < 0))
    return exponent + 127, codes


def test_rounding_is_that_of_the_specification():
    noise = np.random.default_rng(1)
    blocks = noise.standard_normal((300, 32)) * np.exp2(noise.integers(-140, 120, (300, 1)))
    # Ties between all numbers, those beyond the largest, and zeros.
    blocks[:40] = np.arange(32) / 4 * np.exp2(np.arange(-20, 20))[:, None]
    blocks[:40] *= noise.choice([-1, 1], (40, 32))
    blocks[40] = -0.0
    values = blocks.astype(np.float32)
    values[41, 5] = np.finfo(np.float32).max
    values[42] = np.float32(2.0**-149) * np.arange(32)
    words = MXFP4.from_values(values.reshape(100, 96))
    assert words.shape == (100, 51)
    for block, found, codes in zip(
        values.tolist(), words.reshape(-1, 17), codes_of(words), strict=True
    ):
        assert (found[0], codes.tolist()) == rounded(block)
    # What has no more bits stays as it is, but for the scale of some blocks.
    again = MXFP4.from_values(MXFP4.values(words))
    np.testing.assert_array_equal(MXFP4.to_float32(again), MXFP4.to_float32(words))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_no_number_is_made_of_what_is_none(wrong):
    values = np.ones((3, 64), np.float32)
    values[1, 40] = wrong
    words = MXFP4.from_values(values)
    assert not MXFP4.is_finite(words)
    assert np.isnan(MXFP4.to_float32(words)).nonzero()[1].tolist() == list(range(32, 64))


def test_pairs_of_hugging_face_become_blocks(monkeypatch):
    monkeypatch.setattr("kccl.engine.formats.mxfp4._CHUNK", 96)
    noise = np.random.default_rng(1)
    pairs = noise.integers(256, size=(2, 3, 5, 16), dtype=np.uint8)
    scales = noise.integers(256, size=(2, 3, 5), dtype=np.uint8)
    words = MXFP4.from_pairs(pairs, scales)
    assert words.shape == (2, 3, 85) and words.dtype == np.uint8
    np.testing.assert_array_equal(words.reshape(2, 3, 5, 17)[..., 0], scales)
    for block, codes in zip(pairs.reshape(-1, 16).tolist(), codes_of(words), strict=True):
        assert codes.tolist() == [half for byte in block for half in (byte & 15, byte >> 4)]
    # Some of them, with strides.
    some = MXFP4.from_pairs(pairs[:, ::2, 1:4], scales[:, ::2, 1:4])
    np.testing.assert_array_equal(some, words[:, ::2, 17 : 4 * 17])
    for shape in ((2, 3, 4), (2, 3), (2, 3, 1)):
        with pytest.raises(ValueError, match="do not fit scales"):
            MXFP4.from_pairs(pairs, np.zeros(shape, np.uint8))
