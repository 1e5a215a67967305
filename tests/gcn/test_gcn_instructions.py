"""Instructions of the interpreter beside NumPy, where it is easy to be wrong."""

from fractions import Fraction

import numpy as np
import pytest
from device_compilers import has_zig
from gcn_machine import Unknown
from gcn_snippets import LANES, assemble, compute, execute

pytestmark = [
    pytest.mark.long,
    pytest.mark.takes(20),
    pytest.mark.skipif(not has_zig(), reason="the ziglang wheel is not installed"),
]
SEEDS = range(3)
RANDOM = np.random.default_rng(7)
ODD = [0.0, -0.0, 1.0, -1.5, 2.5, 3.5, -0.5, 65504.0, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-26]
ODD += [np.inf, -np.inf, np.nan, 2.0**31, -(2.0**31) - 300, 2.0**32, 1e-40, -1e-45, 3e38, 255.5]


def floats(num=LANES):
    """Gives floats of all sizes, among them those that need care."""
    some = RANDOM.integers(0, 2**32, num, np.uint32).view(np.float32)
    some[num // 2 :] = RANDOM.standard_normal(num - num // 2).astype(np.float32)
    some[: len(ODD)] = ODD
    return some


def integers(num=LANES):
    some = RANDOM.integers(0, 2**32, num, np.uint32)
    some[:5] = [0, 1, 2**31, 2**32 - 1, 0x80FF7F01]
    return some


def saturated(dtype):
    """A conversion from float32 to an integer."""

    def convert(a):
        ends = np.iinfo(dtype)
        whole = np.trunc(np.where(np.isnan(a), 0, a).astype(np.float64))
        return np.clip(whole, ends.min, ends.max).astype(dtype)

    return convert


def permuted(a, b, selectors):
    both = a.astype(np.uint64) << 32 | b
    out = np.zeros_like(a)
    for i in range(4):
        pick = (selectors >> (8 * i) & 0xFF).astype(np.uint64)
        byte = np.where(pick == 12, 0, both >> (8 * (pick % 8)) & 0xFF)
        out |= (byte << (8 * i)).astype(np.uint32)
    return out


def half(a):
    with np.errstate(over="ignore"):
        return a.astype(np.float16)


def lower(a):
    """The lower halves as floats of 16 bits, in FP64."""
    return (a & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)


def narrowed(a):
    return half(a.astype(np.float32)).view(np.uint16).astype(np.uint32)


# Instruction -> its result from its inputs. Registers v10 and so on have these, v40 gets it.
FLOATS = {
    "v_cvt_u32_f32_e32 v40, v10": saturated(np.uint32),
    "v_cvt_i32_f32_e32 v40, v10": saturated(np.int32),
    "v_cvt_f16_f32_e32 v40, v10": lambda a: half(a).view(np.uint16).astype(np.uint32),
    "v_rndne_f32_e32 v40, v10": np.rint,
    "v_floor_f32_e32 v40, v10": np.floor,
    "v_trunc_f32_e32 v40, v10": np.trunc,
    "v_min_f32_e32 v40, v10, v11": np.fmin,
    "v_max_f32_e64 v40, -v10, |v11|": lambda a, b: np.fmax(-a, np.abs(b)),
}
INTEGERS = {
    "v_cvt_f32_u32_e32 v40, v10": lambda a: a.astype(np.float32),
    "v_cvt_f32_i32_e32 v40, v10": lambda a: a.view(np.int32).astype(np.float32),
    "v_cvt_f32_f16_e32 v40, v10": lambda a: (
        (a & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)
    ),
    "v_mul_hi_u32 v40, v10, v11": lambda a, b: (a * b.astype(np.uint64) >> 32).astype(np.uint32),
    "v_mul_hi_i32_i24_e32 v40, v10, v11": lambda a, b: (
        (a.view(np.int32) << 8 >> 8).astype(np.int64) * (b.view(np.int32) << 8 >> 8) >> 32
    ).astype(np.int32),
    "v_bfe_u32 v40, v10, 3, 7": lambda a: a >> 3 & 127,
    "v_bfe_i32 v40, v10, 8, 8": lambda a: (a.view(np.int32) << 16) >> 24,
    "v_bfi_b32 v40, v10, v11, v12": lambda a, b, c: (a & b) | (~a & c),
    "v_alignbit_b32 v40, v10, v11, 5": lambda a, b: a << 27 | b >> 5,
    "v_and_b32_dpp v40, v10, v11 row_mirror row_mask:0xf bank_mask:0xf": lambda a, b: (
        a.reshape(4, 16)[:, ::-1].ravel() & b
    ),
    "v_xor_b32_sdwa v40, v10, v11 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 "
    "src1_sel:BYTE_2": lambda a, b: a >> 16 ^ (b >> 16 & 0xFF),
    "v_xor_b32_sdwa v40, sext(v10), sext(v11) dst_sel:DWORD dst_unused:UNUSED_PAD "
    "src0_sel:BYTE_3 src1_sel:WORD_0": lambda a, b: a.view(np.int32) >> 24 ^ b.astype(np.int16),
    "v_or_b32_sdwa v40, v10, v11 dst_sel:BYTE_1 dst_unused:UNUSED_PAD src0_sel:BYTE_3 "
    "src1_sel:DWORD": lambda a, b: (a >> 24 | b & 0xFF) << 8,
    "v_mov_b32_e32 v40, v11\nv_mov_b32_sdwa v40, v10 dst_sel:BYTE_2 dst_unused:UNUSED_PRESERVE "
    "src0_sel:DWORD": lambda a, b: b & 0xFF00FFFF | (a & 0xFF) << 16,
    "v_min_u16_e32 v40, v10, v11": lambda a, b: np.minimum(a & 0xFFFF, b & 0xFFFF),
}
HALVES = {
    "v_mul_f16_e32 v40, v10, v11": lambda a, b: narrowed(lower(a) * lower(b)),
    "v_mov_b32_e32 v40, v12\nv_fma_mixlo_f16 v40, v10, v11, v12 op_sel:[1,0,0] "
    "op_sel_hi:[1,1,0]": lambda a, b, c: (
        c & 0xFFFF0000 | narrowed(lower(a >> 16) * lower(b) + c.view(np.float32))
    ),
}


def arguments_of(function):
    return getattr(function, "nin", None) or function.__code__.co_argcount


def check(code, function, make):
    inputs = [make() for _ in range(arguments_of(function))]
    with np.errstate(all="ignore"):
        wanted = np.asarray(function(*inputs))
    (found,) = execute(code, inputs)
    is_nan = np.zeros(LANES, bool) if wanted.dtype.kind != "f" else np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found.view(np.float32))[is_nan], True)
    np.testing.assert_array_equal(found[~is_nan], wanted.view(np.uint32)[~is_nan])


@pytest.mark.parametrize("code", FLOATS)
def test_instructions_on_floats(code):
    check(code, FLOATS[code], floats)


@pytest.mark.parametrize("code", INTEGERS)
def test_instructions_on_integers(code):
    check(code, INTEGERS[code], integers)


@pytest.mark.parametrize("code", HALVES)
def test_instructions_on_halves(code):
    """The bits of a NaN are not compared: it may be that of any operand."""
    inputs = [integers() for _ in range(arguments_of(HALVES[code]))]
    with np.errstate(all="ignore"):
        wanted = HALVES[code](*inputs)
        (found,) = execute(code, inputs)
        is_nan = np.isnan(lower(wanted))
        np.testing.assert_array_equal(np.isnan(lower(found)), is_nan)
    compared = np.where(is_nan, 0xFFFF0000, 0xFFFFFFFF).astype(np.uint32)
    np.testing.assert_array_equal(found & compared, wanted & compared)


def test_halves_that_are_no_numbers_are_told():
    a, b = integers(), integers()
    a[:8] |= 0x7E00
    b[4:16] |= 0xFE00
    code = "v_cmp_o_f16_e64 s[2:3], v10, v11\nv_cndmask_b32_e64 v40, 0, 1, s[2:3]"
    (found,) = execute(code, [a, b])
    np.testing.assert_array_equal(found, ~np.isnan(lower(a)) & ~np.isnan(lower(b)))


@pytest.mark.parametrize("seed", SEEDS)
def test_plain_accesses_begin_at_any_byte(seed):
    """They lie within lines of a cache and across them."""
    a, b = integers(), integers()
    code = """global_load_dwordx2 v[40:41], v1, s[4:5] offset:3
global_load_ushort v42, v1, s[4:5] offset:1
s_waitcnt vmcnt(0)
global_store_dword v1, v10, s[4:5] offset:2
global_load_dword v43, v1, s[4:5]"""
    found = execute(code, [a, b], outputs=4, seed=seed)
    stored = np.concatenate([a, b]).view(np.uint8)
    lanes = 4 * np.arange(LANES)[:, None]
    np.testing.assert_array_equal(found[:2].T, stored[lanes + np.arange(3, 11)].view(np.uint32))
    np.testing.assert_array_equal(found[2], stored[lanes + np.arange(1, 3)].view(np.uint16)[:, 0])
    stored[2 : 2 + a.nbytes] = a.view(np.uint8)
    np.testing.assert_array_equal(found[3], stored.view(np.uint32)[:LANES])


@pytest.mark.parametrize("code", ["load_dword v40, v1,", "store_dword v1, v10,"])
def test_accesses_with_a_scope_are_aligned(code):
    """What a peer looks for must come at once."""
    with pytest.raises(AssertionError, match="with a scope that is not aligned"):
        execute(f"global_{code} s[4:5] offset:2 sc0 sc1", [integers(), integers()])


def test_bytes_are_picked():
    a, b = integers(), integers()
    selectors = (
        RANDOM.choice(np.array([0, 1, 2, 3, 4, 5, 6, 7, 12], np.uint8), (LANES, 4))
        .view(np.uint32)
        .ravel()
    )
    (found,) = execute("v_perm_b32 v40, v10, v11, v12", [a, b, selectors])
    np.testing.assert_array_equal(found, permuted(a, b, selectors))


def test_packed_floats_pick_halves_and_signs():
    a, b = RANDOM.standard_normal((2, 2, LANES)).astype(np.float32)
    code = "v_pk_fma_f32 v[40:41], v[10:11], v[12:13], 1.0 op_sel:[1,0,0] op_sel_hi:[0,1,1] "
    found = execute(code + "neg_lo:[0,0,1] neg_hi:[1,0,0]", [*a, *b], outputs=2)
    # Each product is exact in FP64, and so is the sum.
    low = a[1].astype(np.float64) * b[0] - 1
    high = -a[0].astype(np.float64) * b[1] + 1
    wanted = np.stack([low, high]).astype(np.float32)
    np.testing.assert_array_equal(found, wanted.view(np.uint32))


def test_packed_words_pick_halves():
    a, b = integers(), integers()
    low, high = a & 15, a >> 16 & 15
    code = "v_pk_lshrrev_b16 v40, v10, v11 op_sel:[1,0] op_sel_hi:[0,1]"
    (found,) = execute(code, [a, b])
    np.testing.assert_array_equal(found, (b & 0xFFFF) >> high | b >> 16 >> low << 16)
    (found,) = execute("v_pk_lshlrev_b16 v40, v10, v11", [a, b])
    np.testing.assert_array_equal(found, (b & 0xFFFF) << low & 0xFFFF | b >> 16 << high << 16)
    (found,) = execute("v_pk_sub_i16 v40, v10, v11 op_sel_hi:[1,0]", [a, b])
    np.testing.assert_array_equal(found, (a - b & 0xFFFF) | (a >> 16) - b << 16)


def test_shared_memory_keeps_16_bytes():
    words = [integers() for _ in range(4)]
    code = """ds_write_b128 v2, v[10:13] offset:16
ds_read_b128 v[40:43], v2 offset:16
ds_read2_b64 v[44:47], v2 offset0:2 offset1:3
ds_read_u16 v48, v2 offset:18"""
    found = execute(code, words, outputs=9)
    np.testing.assert_array_equal(found, [*words, *words, words[0] >> 16])


def test_an_element_of_a_table_is_loaded():
    """Its offset in the table stands in the instruction. Behind a label of code nothing may."""
    code = """s_getpc_b64 s[8:9]
	s_add_u32 s8, s8, {}@rel32@lo+12
	s_addc_u32 s9, s9, {}@rel32@hi+20
	s_load_dword s10, s[8:9], 0x0
	s_waitcnt lgkmcnt(0)
	v_mov_b32_e32 v40, s10
	.section .rodata
table:
	.long 7
	.long 8
	.long 9
	.text"""
    (found,) = execute(code.format("table", "table"), [integers()])
    assert set(found) == {9}
    with pytest.raises(Unknown, match="offset into code"):
        execute(code.format("snippet", "snippet"), [integers()])


def test_a_product_is_added_in_64_bits():
    a, b, low, high = (integers() for _ in range(4))
    found = execute("v_mad_u64_u32 v[40:41], vcc, v10, v11, v[12:13]", [a, b, low, high], 2)
    wanted = a.astype(np.uint64) * b + (low.astype(np.uint64) | high.astype(np.uint64) << 32)
    np.testing.assert_array_equal(found[0] | found[1].astype(np.uint64) << 32, wanted)


@pytest.mark.parametrize("seed", SEEDS)
def test_approximations_are_within_a_unit_of_the_last_place(seed):
    a = np.abs(RANDOM.standard_normal(LANES)).astype(np.float32) + 0.1
    functions = {"rcp": lambda x: 1 / x, "sqrt": np.sqrt, "rsq": lambda x: x**-0.5}
    functions |= {"exp": np.exp2, "log": np.log2}
    off = 0
    for name, function in functions.items():
        (found,) = execute(f"v_{name}_f32_e32 v40, v10", [a], seed=seed)
        wanted = function(a.astype(np.float64)).astype(np.float32)
        units = np.abs(found.view(np.int32).astype(np.int64) - wanted.view(np.int32))
        assert units.max() <= 1
        off += np.count_nonzero(units)
    assert (off > LANES) == (seed != 0)


# Expressions that clang computes in many instructions, from approximations -> NumPy's.
EXACT = {
    "a / b": np.divide,
    "kccl::platform::square_root(a)": lambda a, b: np.sqrt(a),
    "kccl::platform::square_root(a * 0x1p-100f)": lambda a, b: np.sqrt(a * np.float32(2.0**-100)),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("expression", EXACT)
def test_quotients_and_roots_are_rounded_right(expression, seed):
    """For floats of all sizes, although reciprocals and roots are off by a unit."""
    num = 32 * LANES
    a, b = floats(num), floats(num)
    b[len(ODD) :] = RANDOM.permutation(b[len(ODD) :])
    a[-LANES:], b[-LANES:] = 1e-38 * a[-LANES:], 3.0
    with np.errstate(all="ignore"):
        wanted = EXACT[expression](a, b)
    found = compute(expression, [a, b], np.float32, seed)
    is_nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), is_nan)
    np.testing.assert_array_equal(found.view(np.uint32)[~is_nan], wanted.view(np.uint32)[~is_nan])


@pytest.mark.parametrize("operator", ["/", "%"])
def test_integers_are_divided(operator):
    """By way of reciprocals of floats."""
    a, b = integers(8 * LANES), np.maximum(integers(8 * LANES) >> np.uint32(21), 1)
    wanted = a // b if operator == "/" else a % b
    found = compute(f"a {operator} b", [a, b], np.uint32, seed=1)
    np.testing.assert_array_equal(found, wanted)


def scaled(x, least):
    """The power of two that a number's digits count from: with `least`, a small one's is that."""
    if x == 0:
        return -126
    return max(int(np.floor(np.log2(abs(float(x))))), least)


def cut(x, unit):
    """Toward zero, to a multiple of 2^unit."""
    digits = abs(x) / Fraction(2) ** unit
    return (1 if x > 0 else -1) * (digits.numerator // digits.denominator) * Fraction(2) ** unit


def down(x, unit):
    digits = x / Fraction(2) ** unit
    return digits.numerator // digits.denominator * Fraction(2) ** unit


def fused_sum(a, b, addend, least):
    """What interpreter/matrix.h says of eight products, in exact numbers."""
    products = [Fraction(float(x)) * Fraction(float(y)) for x, y in zip(a, b, strict=True)]
    most = max(scaled(x, least) + scaled(y, least) for x, y in zip(a, b, strict=True))
    total = sum(cut(each, most - 24) for each in products)
    own = scaled(addend, -126)
    larger = max(most, own)
    # 37 digits at most, so FP64 has the sum, and it is rounded once.
    both = down(total, larger - 31) + down(Fraction(float(addend)), larger - 24)
    return np.float32(float(both))


def narrow(values, dtype):
    """Values that 16 bits hold, and their bits."""
    if dtype == "f16":
        kept = values.astype(np.float16)
        return kept.astype(np.float32), kept.view(np.uint16)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    return (bits.astype(np.uint32) << 16).view(np.float32), bits


def as_rows(bits):
    """[16 rows, 16 columns] of 16 bits as the registers of A, or, turned, of B: two words."""
    lanes = bits.reshape(16, 4, 4).swapaxes(0, 1).reshape(LANES, 4)
    return [
        np.ascontiguousarray(lanes[:, 2 * i : 2 * i + 2]).view(np.uint32).ravel() for i in (0, 1)
    ]


@pytest.mark.parametrize(("dtype", "least"), [("f16", -14), ("bf16", -126)])
@pytest.mark.parametrize("spread", [1, 8])
def test_matrix_units_add_up_as_published(dtype, least, spread):
    """With factors of one size, and of sizes so different that sums lose digits."""
    generator = np.random.default_rng(spread)
    sizes = np.exp2(generator.integers(-spread, spread + 1, (3, 16, 16)))
    a, b, c = (generator.standard_normal((3, 16, 16)) * sizes).astype(np.float32)
    a[0, :4], c[1, :8] = 0, 0
    a[2] *= 2.0**-14  # FP16's subnormal numbers
    (a, a_bits), (b, b_bits) = narrow(a, dtype), narrow(b, dtype)
    wanted = c.copy()
    for row, column in np.ndindex(16, 16):
        for first in (0, 8):
            part = slice(first, first + 8)
            wanted[row, column] = fused_sum(
                a[row, part], b[part, column], wanted[row, column], least
            )
    inputs = [*as_rows(a_bits), *as_rows(np.ascontiguousarray(b_bits.T))]
    inputs += list(np.ascontiguousarray(c.reshape(4, 4, 16).swapaxes(0, 1)).reshape(4, LANES))
    code = f"v_mfma_f32_16x16x16_{dtype} v[40:43], v[10:11], v[12:13], v[14:17]"
    found = execute(code, inputs, outputs=4).view(np.float32).reshape(4, 4, 16)
    found = found.swapaxes(0, 1).reshape(16, 16)
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))
    exact = c + a.astype(np.float64) @ b
    np.testing.assert_allclose(found, exact, atol=1e-6 * np.abs(exact).max())
    assert (found != exact.astype(np.float32)).any()


def test_clang_knows_these_instructions(tmp_path):
    snippets = [(code, 3, 1) for code in (*FLOATS, *INTEGERS, "v_perm_b32 v40, v10, v11, v12")]
    assert assemble(snippets, tmp_path) == ""
