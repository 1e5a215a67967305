// Vector instructions on floats, and products of matrices.
//
// v_rcp, v_rsq, v_sqrt, v_exp and v_log may be off by a unit of the last place, as on the hardware.
// Clang corrects what it needs to be exact.
#include <cmath>
#include <limits>

#include "machine.h"
#include "matrix.h"

namespace gcn {
namespace {

using In = const Instruction&;
using U = uint32_t;
using UU = uint64_t;
constexpr auto f = [](U bits) { return std::bit_cast<float>(bits); };
constexpr auto u = [](float value) { return std::bit_cast<U>(value); };

float half(U bits) {
    return static_cast<float>(std::bit_cast<_Float16>(static_cast<uint16_t>(bits)));
}
U to_half(float value) { return std::bit_cast<uint16_t>(static_cast<_Float16>(value)); }

template <auto F>
void unary(Wave& w, In in) {
    Lanes a = w.lanes(in, 1);
    for (U& each : a) each = F(each);
    w.set_lanes(in, in.at[0], a);
}

// The result of F, which has more digits than a float, to one unit of the last place.
template <auto F>
void nearly(Wave& w, In in) {
    Lanes a = w.lanes(in, 1);
    for (U& each : a) each = w.machine->nearly(F(f(each)), each);
    w.set_lanes(in, in.at[0], a);
}

template <auto F>
void binary(Wave& w, In in) {
    Lanes a = w.lanes(in, 1);
    const Lanes b = w.lanes(in, 2);
    for (int i = 0; i < kLanes; ++i) a[i] = u(F(f(a[i]), f(b[i])));
    w.set_lanes(in, in.at[0], a);
}

// Operands a, b and c of the three: fmac adds to its result, fmamk and fmaak have a literal.
template <int A, int B, int C>
void fma_of(Wave& w, In in) {
    Lanes a = w.lanes(in, A);
    const Lanes b = w.lanes(in, B), c = w.lanes(in, C);
    for (int i = 0; i < kLanes; ++i) a[i] = u(std::fma(f(a[i]), f(b[i]), f(c[i])));
    w.set_lanes(in, in.at[0], a);
}

template <auto F>
void compare(Wave& w, In in) {
    const Lanes a = w.lanes(in, 1), b = w.lanes(in, 2);
    UU result = 0;
    for (int i = 0; i < kLanes; ++i) result |= static_cast<UU>(F(f(a[i]), f(b[i])) ? 1 : 0) << i;
    w.set_scalar64(in.at[0], result & w.exec());
}

// Whether both halves in the lower bits are numbers.
void compare_order_of_halves(Wave& w, In in) {
    const Lanes a = w.lanes(in, 1), b = w.lanes(in, 2);
    UU result = 0;
    for (int i = 0; i < kLanes; ++i) {
        const bool has_nan = std::isnan(half(a[i] & 0xffff)) || std::isnan(half(b[i] & 0xffff));
        result |= static_cast<UU>(has_nan ? 0 : 1) << i;
    }
    w.set_scalar64(in.at[0], result & w.exec());
}

template <auto F>
void binary_of_halves(Wave& w, In in) {
    Lanes a = w.lanes(in, 1);
    const Lanes b = w.lanes(in, 2);
    for (int i = 0; i < kLanes; ++i) a[i] = to_half(F(half(a[i]), half(b[i])));
    w.set_lanes(in, in.at[0], a);
}

// a b + c in FP32, of floats or of halves that become floats: op_sel_hi says which are halves,
// op_sel which half. The result goes into the lower half of the register.
void fma_mix_low(Wave& w, In in) {
    std::array<Lanes, 3> of;
    for (int k = 0; k < 3; ++k) {
        of[k] = w.lanes(in, k + 1);
        if ((in.op_sel_hi >> k & 1) == 0) continue;
        const Operand& from = in.at[k + 1];
        if (from.absolute || from.negated) throw Error("the sign of a half of a register");
        for (U& each : of[k]) each = u(half(each >> (in.op_sel >> k & 1) * 16 & 0xffff));
    }
    Lanes out = w.lanes(in, 0);
    for (int i = 0; i < kLanes; ++i) {
        const U low = to_half(std::fma(f(of[0][i]), f(of[1][i]), f(of[2][i])));
        out[i] = (out[i] & 0xffff0000) | low;
    }
    w.set_lanes(in, in.at[0], out);
}

// Word HALF of a packed operand, as op_sel and op_sel_hi say.
template <int HALF>
Lanes packed(const Wave& w, In in, int k) {
    const int bit = k - 1;
    const int word = ((HALF == 0 ? in.op_sel : in.op_sel_hi) >> bit) & 1;
    const Operand& from = in.at[k];
    // A constant is the same in both words.
    Lanes out = w.lanes(in, k, from.kind == Operand::Kind::kValue ? 0 : word);
    if ((((HALF == 0 ? in.neg_lo : in.neg_hi) >> bit) & 1) != 0) {
        for (U& each : out) each ^= 0x80000000;
    }
    return out;
}

template <auto F, int NUM>
void packed_pair(Wave& w, In in) {
    const auto one = [&]<int HALF>() {
        Lanes a = packed<HALF>(w, in, 1);
        const Lanes b = packed<HALF>(w, in, 2);
        const Lanes c = NUM == 3 ? packed<HALF>(w, in, 3) : a;
        for (int i = 0; i < kLanes; ++i) a[i] = u(F(f(a[i]), f(b[i]), f(c[i])));
        return a;
    };
    const Lanes low = one.template operator()<0>(), high = one.template operator()<1>();
    w.set_lanes(in, in.at[0], low, 0);
    w.set_lanes(in, in.at[0], high, 1);
}

float least(float a, float b) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? a : b;
    return a < b ? a : b;
}

float most(float a, float b) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}

template <class To>
U converted(float value) {
    if (std::isnan(value)) return 0;
    const double least = std::numeric_limits<To>::min(), most = std::numeric_limits<To>::max();
    const double whole = std::trunc(static_cast<double>(value));
    return static_cast<U>(static_cast<To>(whole < least ? least : whole > most ? most : whole));
}

int exponent(float value) { return static_cast<int>(u(value) >> 23 & 0xff); }

// The three of a division, as AMD's manual defines them.
void div_scale(Wave& w, In in) {
    const Lanes s0 = w.lanes(in, 2), s1 = w.lanes(in, 3), s2 = w.lanes(in, 4);
    Lanes out;
    UU scaled = 0;
    for (int i = 0; i < kLanes; ++i) {
        const float s = f(s0[i]), denominator = f(s1[i]), numerator = f(s2[i]);
        float result = s;
        bool mark = false;
        const int gap = exponent(numerator) - exponent(denominator);
        if (numerator == 0 || denominator == 0) {
            result = std::numeric_limits<float>::quiet_NaN();
        } else if (gap >= 96) {
            mark = true;
            if (s0[i] == s1[i]) result = std::ldexp(s, 64);
        } else if (exponent(denominator) == 0) {
            result = std::ldexp(s, 64);
        } else if (std::fpclassify(1.0f / denominator) == FP_SUBNORMAL &&
                   std::fpclassify(numerator / denominator) == FP_SUBNORMAL) {
            // The manual has 64, with which the denominator would be infinite. v_div_fmas scales
            // by -64 then.
            mark = true;
            if (s0[i] == s1[i]) result = std::ldexp(s, -64);
        } else if (std::fpclassify(1.0f / denominator) == FP_SUBNORMAL) {
            result = std::ldexp(s, -64);
        } else if (std::fpclassify(numerator / denominator) == FP_SUBNORMAL) {
            mark = true;
            if (s0[i] == s2[i]) result = std::ldexp(s, 64);
        } else if (exponent(numerator) <= 23) {
            result = std::ldexp(s, 64);
        }
        out[i] = u(result);
        scaled |= UU{mark} << i;
    }
    w.set_scalar64(in.at[1], scaled & w.exec());
    w.set_lanes(in, in.at[0], out);
}

// 2^places * (a b + c), rounded once.
float scaled_fma(float a, float b, float c, int places) {
    const double product = double{a} * b, addend = c;
    double sum = product + addend;
    const double of_addend = sum - product;
    const double rest = (product - (sum - of_addend)) + (addend - of_addend);
    // To an odd last bit, which keeps the second rounding right.
    auto bits = std::bit_cast<UU>(sum);
    if (std::isfinite(rest) && rest != 0 && (bits & 1) == 0)
        sum = std::bit_cast<double>((rest > 0) == (sum > 0) ? bits + 1 : bits - 1);
    return static_cast<float>(std::ldexp(sum, places));
}

void div_fmas(Wave& w, In in) {
    Lanes a = w.lanes(in, 1);
    const Lanes b = w.lanes(in, 2), c = w.lanes(in, 3);
    for (int i = 0; i < kLanes; ++i) {
        const bool is_scaled = (w.pair(kVcc) >> i & 1) != 0;
        const int places = !is_scaled ? 0 : exponent(f(c[i])) > 127 ? 64 : -64;
        a[i] = u(scaled_fma(f(a[i]), f(b[i]), f(c[i]), places));
    }
    w.set_lanes(in, in.at[0], a);
}

void div_fixup(Wave& w, In in) {
    Lanes quotient = w.lanes(in, 1);
    const Lanes denominators = w.lanes(in, 2), numerators = w.lanes(in, 3);
    for (int i = 0; i < kLanes; ++i) {
        const float d = f(denominators[i]), n = f(numerators[i]), q = f(quotient[i]);
        const bool is_negative = std::signbit(d) != std::signbit(n);
        float result = std::copysign(q, is_negative ? -1.0f : 1.0f);
        if (std::isnan(n) || std::isnan(d))
            result = std::isnan(n) ? n : d;
        else if ((n == 0 && d == 0) || (std::isinf(n) && std::isinf(d)))
            result = std::numeric_limits<float>::quiet_NaN();
        else if (d == 0 || std::isinf(n))
            result = std::copysign(INFINITY, is_negative ? -1.0f : 1.0f);
        else if (std::isinf(d) || n == 0)
            result = std::copysign(0.0f, is_negative ? -1.0f : 1.0f);
        else if (exponent(n) - exponent(d) < -150)
            result = std::copysign(0.0f, result);
        else if (std::isnan(q))
            // The quotient is beyond FP32, so the steps before made a NaN. The manual does not
            // mention this case. Clang's quotients are infinite then.
            result = std::copysign(INFINITY, is_negative ? -1.0f : 1.0f);
        quotient[i] = u(result);
    }
    w.set_lanes(in, in.at[0], quotient);
}

void is_of_class(Wave& w, In in) {
    const Lanes a = w.lanes(in, 1), wanted = w.lanes(in, 2);
    UU result = 0;
    for (int i = 0; i < kLanes; ++i) {
        const float value = f(a[i]);
        int bit = 0;
        switch (std::fpclassify(value)) {
            case FP_NAN: bit = (a[i] & 0x400000) != 0 ? 1 : 0; break;
            case FP_INFINITE: bit = std::signbit(value) ? 2 : 9; break;
            case FP_NORMAL: bit = std::signbit(value) ? 3 : 8; break;
            case FP_SUBNORMAL: bit = std::signbit(value) ? 4 : 7; break;
            default: bit = std::signbit(value) ? 5 : 6;
        }
        result |= UU{(wanted[i] >> bit & 1) != 0} << i;
    }
    w.set_scalar64(in.at[0], result & w.exec());
}

// D = A B + C of 16 x 16 x 16. Lane l has of A, B and C, D: row, column and column l % 16; columns,
// rows and rows 4 (l / 16) to 4 (l / 16) + 3.
template <auto WIDEN, int LEAST_EXPONENT>
void multiply_matrices(Wave& w, In in) {
    Factor a[16][16], b[16][16];  // [row][column], [column][row]
    for (int word = 0; word < 2; ++word) {
        const Lanes left = w.lanes(in, 1, word), right = w.lanes(in, 2, word);
        for (int i = 0; i < kLanes; ++i) {
            for (int part = 0; part < 2; ++part) {
                const int k = 4 * (i / 16) + 2 * word + part;
                a[i % 16][k] = factor_of(WIDEN(left[i] >> (16 * part) & 0xffff), LEAST_EXPONENT);
                b[i % 16][k] = factor_of(WIDEN(right[i] >> (16 * part) & 0xffff), LEAST_EXPONENT);
            }
        }
    }
    std::array<Lanes, 4> sums;
    for (int r = 0; r < 4; ++r) {
        sums[r] = w.lanes(in, 3, in.at[3].kind == Operand::Kind::kValue ? 0 : r);
        for (int i = 0; i < kLanes; ++i) {
            float sum = f(sums[r][i]);
            for (int k = 0; k < 16; k += kProductsAtOnce)
                sum = fused_sum(a[4 * (i / 16) + r] + k, b[i % 16] + k, sum);
            sums[r][i] = u(sum);
        }
    }
    // Matrix units do not look at EXEC.
    for (int r = 0; r < 4; ++r) w.v[w.place(in.at[0]) + r] = sums[r];
}

float widen_bfloat16(U bits) { return f(bits << 16); }

}  // namespace

void add_float_opcodes(std::map<std::string, Opcode, std::less<>>& all) {
    const auto add = [&](const char* name, Handler run) { all[name] = {run, Unit::kVector}; };
    const auto slow = [&](const char* name, Handler run) { all[name] = {run, Unit::kSlow}; };

    add("v_add_f32", binary<[](float a, float b) { return a + b; }>);
    add("v_sub_f32", binary<[](float a, float b) { return a - b; }>);
    add("v_subrev_f32", binary<[](float a, float b) { return b - a; }>);
    add("v_mul_f32", binary<[](float a, float b) { return a * b; }>);
    add("v_min_f32", binary<least>);
    add("v_max_f32", binary<most>);
    add("v_fma_f32", fma_of<1, 2, 3>);
    add("v_fmac_f32", fma_of<1, 2, 0>);
    add("v_fmamk_f32", fma_of<1, 2, 3>);
    add("v_fmaak_f32", fma_of<1, 2, 3>);
    add("v_pk_add_f32", packed_pair<[](float a, float b, float) { return a + b; }, 2>);
    add("v_pk_mul_f32", packed_pair<[](float a, float b, float) { return a * b; }, 2>);
    add("v_pk_fma_f32",
        packed_pair<[](float a, float b, float c) { return std::fma(a, b, c); }, 3>);
    add("v_trunc_f32", unary<[](U a) { return u(std::trunc(f(a))); }>);
    add("v_floor_f32", unary<[](U a) { return u(std::floor(f(a))); }>);
    add("v_rndne_f32", unary<[](U a) { return u(std::nearbyint(f(a))); }>);
    add("v_cvt_f32_u32", unary<[](U a) { return (u(static_cast<float>(a))); }>);
    add("v_cvt_f32_i32",
        unary<[](U a) { return (u(static_cast<float>(static_cast<int32_t>(a)))); }>);
    add("v_cvt_f32_ubyte0", unary<[](U a) { return (u(static_cast<float>(a & 0xff))); }>);
    add("v_cvt_u32_f32", unary<[](U a) { return (converted<uint32_t>(f(a))); }>);
    add("v_cvt_i32_f32", unary<[](U a) { return (converted<int32_t>(f(a))); }>);
    add("v_cvt_f32_f16", unary<[](U a) { return u(half(a & 0xffff)); }>);
    add("v_cvt_f16_f32", unary<[](U a) { return to_half(f(a)); }>);
    slow("v_rcp_f32", nearly<[](double a) { return 1 / a; }>);
    slow("v_rcp_iflag_f32", nearly<[](double a) { return 1 / a; }>);
    slow("v_sqrt_f32", nearly<[](double a) { return std::sqrt(a); }>);
    slow("v_rsq_f32", nearly<[](double a) { return 1 / std::sqrt(a); }>);
    slow("v_exp_f32", nearly<[](double a) { return std::exp2(a); }>);
    slow("v_log_f32", nearly<[](double a) { return std::log2(a); }>);
    add("v_div_scale_f32", div_scale);
    add("v_div_fmas_f32", div_fmas);
    add("v_div_fixup_f32", div_fixup);
    add("v_cmp_class_f32", is_of_class);
    add("v_cmp_o_f16", compare_order_of_halves);
    // FP32 has twice the digits of FP16 and two more, so rounding twice is rounding once.
    add("v_mul_f16", binary_of_halves<[](float a, float b) { return a * b; }>);
    add("v_fma_mixlo_f16", fma_mix_low);
    all["v_mfma_f32_16x16x16_f16"] = {multiply_matrices<half, kLeastHalf>, Unit::kMatrix};
    all["v_mfma_f32_16x16x16_bf16"] = {multiply_matrices<widen_bfloat16, kLeastBfloat16>,
                                       Unit::kMatrix};

    const auto test = [&](const char* name, Handler run) {
        all[std::string("v_cmp_") + name + "_f32"] = {run, Unit::kVector};
    };
    test("eq", compare<[](float a, float b) { return a == b; }>);
    test("lt", compare<[](float a, float b) { return a < b; }>);
    test("le", compare<[](float a, float b) { return a <= b; }>);
    test("gt", compare<[](float a, float b) { return (a > b); }>);
    test("ge", compare<[](float a, float b) { return (a >= b); }>);
    test("lg", compare<[](float a, float b) { return (a < b || a > b); }>);
    test("o", compare<[](float a, float b) { return !std::isnan(a) && !std::isnan(b); }>);
    test("u", compare<[](float a, float b) { return std::isnan(a) || std::isnan(b); }>);
    test("neq", compare<[](float a, float b) { return !(a == b); }>);
    test("nlt", compare<[](float a, float b) { return !(a < b); }>);
    test("nle", compare<[](float a, float b) { return !(a <= b); }>);
    test("ngt", compare<[](float a, float b) { return (!(a > b)); }>);
    test("nge", compare<[](float a, float b) { return (!(a >= b)); }>);
    test("nlg", compare<[](float a, float b) { return (!(a < b || a > b)); }>);
}

}  // namespace gcn
