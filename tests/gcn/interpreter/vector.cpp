// Vector instructions on integers and bits, comparisons, and moves between lanes.
#include <algorithm>
#include <bit>

#include "wave.h"

namespace gcn {
namespace {

using In = const Instruction&;
using U = uint32_t;
using UU = uint64_t;

int32_t as_signed(U value) { return static_cast<int32_t>(value); }

template <auto F>
void unary(Wave& w, In in) {
    Lanes a = w.lanes(in, 1);
    for (U& each : a) each = F(each);
    w.set_lanes(in, in.at[0], a);
}

template <auto F>
void binary(Wave& w, In in) {
    Lanes a = w.lanes(in, 1);
    const Lanes b = w.lanes(in, 2);
    for (int i = 0; i < kLanes; ++i) a[i] = F(a[i], b[i]);
    w.set_lanes(in, in.at[0], a);
}

template <auto F>
void ternary(Wave& w, In in) {
    Lanes a = w.lanes(in, 1);
    const Lanes b = w.lanes(in, 2), c = w.lanes(in, 3);
    for (int i = 0; i < kLanes; ++i) a[i] = F(a[i], b[i], c[i]);
    w.set_lanes(in, in.at[0], a);
}

// 64 bits, of operand k.
std::array<UU, kLanes> wide(const Wave& w, In in, int k) {
    std::array<UU, kLanes> out;
    const Operand& from = in.at[k];
    const Lanes low = w.lanes(in, k);
    const bool is_pair = (from.kind == Operand::Kind::kValue && !from.is_float) || from.count == 2;
    if (!is_pair) throw Error("not a pair of registers: " + std::string(from.text));
    const Lanes high = w.lanes(in, k, 1);
    for (int i = 0; i < kLanes; ++i) out[i] = low[i] | UU{high[i]} << 32;
    return out;
}

void set_wide(Wave& w, In in, const std::array<UU, kLanes>& values) {
    Lanes low, high;
    for (int i = 0; i < kLanes; ++i) {
        low[i] = static_cast<U>(values[i]);
        high[i] = static_cast<U>(values[i] >> 32);
    }
    w.set_lanes(in, in.at[0], low, 0);
    w.set_lanes(in, in.at[0], high, 1);
}

// F of 16 bits each, of the halves that op_sel and op_sel_hi say.
template <auto F>
void packed_words(Wave& w, In in) {
    const Lanes a = w.lanes(in, 1), b = w.lanes(in, 2);
    const auto half = [](U word, int sel, int k) { return word >> (sel >> k & 1) * 16 & 0xffff; };
    Lanes out;
    for (int i = 0; i < kLanes; ++i) {
        const U low = F(half(a[i], in.op_sel, 0), half(b[i], in.op_sel, 1));
        const U high = F(half(a[i], in.op_sel_hi, 0), half(b[i], in.op_sel_hi, 1));
        out[i] = (low & 0xffff) | high << 16;
    }
    w.set_lanes(in, in.at[0], out, 0);
}

// A carry or the outcome of a comparison for each active lane; zero for the others.
void set_mask(Wave& w, const Operand& to, UU bits) { w.set_scalar64(to, bits & w.exec()); }

// op result, carry out, a, b[, carry in]
template <auto F, bool HAS_CARRY>
void with_carry(Wave& w, In in) {
    Lanes a = w.lanes(in, 2);
    const Lanes b = w.lanes(in, 3);
    const UU carry_in = HAS_CARRY ? w.scalar64(in.at[4]) : 0;
    UU carry_out = 0;
    for (int i = 0; i < kLanes; ++i) {
        const UU sum = F(UU{a[i]}, UU{b[i]}, carry_in >> i & 1);
        a[i] = static_cast<U>(sum);
        carry_out |= (sum >> 32 & 1) << i;
    }
    set_mask(w, in.at[1], carry_out);
    w.set_lanes(in, in.at[0], a);
}

template <class T, auto F>
void compare(Wave& w, In in) {
    UU result = 0;
    if constexpr (sizeof(T) == 8) {
        const auto a = wide(w, in, 1), b = wide(w, in, 2);
        for (int i = 0; i < kLanes; ++i)
            result |= UU{F(static_cast<T>(a[i]), static_cast<T>(b[i]))} << i;
    } else {
        const Lanes a = w.lanes(in, 1), b = w.lanes(in, 2);
        for (int i = 0; i < kLanes; ++i)
            result |= UU{F(static_cast<T>(a[i]), static_cast<T>(b[i]))} << i;
    }
    set_mask(w, in.at[0], result);
}

template <bool IS_SIGNED>
void mad_64_32(Wave& w, In in) {
    const Lanes a = w.lanes(in, 2), b = w.lanes(in, 3);
    auto sums = wide(w, in, 4);
    UU overflow = 0;
    for (int i = 0; i < kLanes; ++i) {
        const UU product = IS_SIGNED ? static_cast<UU>(int64_t{as_signed(a[i])} * as_signed(b[i]))
                                     : UU{a[i]} * b[i];
        const UU sum = product + sums[i];
        overflow |= UU{sum < product} << i;
        sums[i] = sum;
    }
    set_mask(w, in.at[1], overflow);
    set_wide(w, in, sums);
}

template <auto F>
void shift_wide(Wave& w, In in) {
    const Lanes by = w.lanes(in, 1);
    auto values = wide(w, in, 2);
    for (int i = 0; i < kLanes; ++i) values[i] = F(values[i], by[i] & 63);
    set_wide(w, in, values);
}

template <int HALF>
void count_lanes(Wave& w, In in) {
    const Lanes mask = w.lanes(in, 1);
    Lanes sum = w.lanes(in, 2);
    for (int i = 0; i < kLanes; ++i) {
        const int below = HALF == 0 ? (i < 32 ? i : 32) : (i < 32 ? 0 : i - 32);
        const U bits = below == 32 ? ~0u : (1u << below) - 1;
        sum[i] += static_cast<U>(std::popcount(mask[i] & bits));
    }
    w.set_lanes(in, in.at[0], sum);
}

void select(Wave& w, In in) {
    const Lanes no = w.lanes(in, 1);
    Lanes yes = w.lanes(in, 2);
    const UU mask = w.scalar64(in.at[3]);
    for (int i = 0; i < kLanes; ++i) {
        if ((mask >> i & 1) == 0) yes[i] = no[i];
    }
    w.set_lanes(in, in.at[0], yes);
}

U most(U a, U b, U c) { return std::max(std::max(a, b), c); }
U least(U a, U b, U c) { return std::min(std::min(a, b), c); }

U reversed(U from) {
    U to = 0;
    for (int i = 0; i < 32; ++i, from >>= 1) to = to << 1 | (from & 1);
    return to;
}

U extract_signed(U a, U b, U c) {
    const U num = c & 31, first = b & 31;
    if (num == 0) return 0;
    if (first + num >= 32) return static_cast<U>(as_signed(a) >> first);
    return static_cast<U>(as_signed(a << (32 - first - num)) >> (32 - num));
}

U pick_bytes(U a, U b, U c) {
    const UU both = UU{a} << 32 | b;
    U out = 0;
    for (int i = 0; i < 4; ++i) {
        const U pick = c >> (8 * i) & 0xff;
        if (pick > 7 && pick != 12) throw Error("v_perm_b32 with a selector that is not a byte");
        out |= (pick == 12 ? 0 : static_cast<U>(both >> (8 * pick) & 0xff)) << (8 * i);
    }
    return out;
}

U low24(U value) { return value & 0xffffff; }
int32_t signed24(U value) { return static_cast<int32_t>(value << 8) >> 8; }

}  // namespace

void add_vector_opcodes(std::map<std::string, Opcode, std::less<>>& all) {
    const auto add = [&](const char* name, Handler run) { all[name] = {run, Unit::kVector}; };

    add("v_mov_b32", unary<[](U a) { return a; }>);
    add("v_not_b32", unary<[](U a) { return ~a; }>);
    add("v_accvgpr_mov_b32", unary<[](U a) { return a; }>);
    add("v_accvgpr_read_b32", unary<[](U a) { return a; }>);
    add("v_accvgpr_write_b32", unary<[](U a) { return a; }>);
    add("v_bfrev_b32", unary<reversed>);
    add("v_ffbh_u32",
        unary<[](U a) { return a == 0 ? ~0u : static_cast<U>(std::countl_zero(a)); }>);
    add("v_ffbl_b32",
        unary<[](U a) { return (a == 0 ? ~0u : static_cast<U>(std::countr_zero(a))); }>);
    add("v_mov_b64", [](Wave& w, In in) { set_wide(w, in, wide(w, in, 1)); });
    add("v_add_u32", binary<[](U a, U b) { return a + b; }>);
    add("v_sub_u32", binary<[](U a, U b) { return a - b; }>);
    add("v_sub_u32 clamp", binary<[](U a, U b) { return (a > b ? a - b : 0); }>);
    add("v_subrev_u32", binary<[](U a, U b) { return b - a; }>);
    add("v_mul_lo_u32", binary<[](U a, U b) { return a * b; }>);
    add("v_mul_hi_u32", binary<[](U a, U b) { return static_cast<U>(UU{a} * b >> 32); }>);
    add("v_mul_hi_i32", binary<[](U a, U b) {
            return static_cast<U>(int64_t{as_signed(a)} * as_signed(b) >> 32);
        }>);
    add("v_mul_u32_u24", binary<[](U a, U b) { return low24(a) * low24(b); }>);
    add("v_mul_hi_u32_u24",
        binary<[](U a, U b) { return static_cast<U>(UU{low24(a)} * low24(b) >> 32); }>);
    add("v_mul_hi_i32_i24",
        binary<[](U a, U b) { return static_cast<U>(int64_t{signed24(a)} * signed24(b) >> 32); }>);
    add("v_mul_i32_i24",
        binary<[](U a, U b) { return (static_cast<U>(signed24(a) * signed24(b))); }>);
    add("v_and_b32", binary<[](U a, U b) { return a & b; }>);
    add("v_or_b32", binary<[](U a, U b) { return a | b; }>);
    add("v_xor_b32", binary<[](U a, U b) { return a ^ b; }>);
    add("v_xnor_b32", binary<[](U a, U b) { return ~(a ^ b); }>);
    add("v_lshlrev_b32", binary<[](U a, U b) { return b << (a & 31); }>);
    add("v_lshrrev_b32", binary<[](U a, U b) { return (b >> (a & 31)); }>);
    add("v_ashrrev_i32",
        binary<[](U a, U b) { return (static_cast<U>(as_signed(b) >> (a & 31))); }>);
    add("v_min_u32", binary<[](U a, U b) { return a < b ? a : b; }>);
    add("v_max_u32", binary<[](U a, U b) { return (a > b ? a : b); }>);
    add("v_min_i32", binary<[](U a, U b) { return as_signed(a) < as_signed(b) ? a : b; }>);
    add("v_max_i32", binary<[](U a, U b) { return (as_signed(a) > as_signed(b) ? a : b); }>);
    add("v_add_u16", binary<[](U a, U b) { return (a + b) & 0xffff; }>);
    add("v_sub_u16", binary<[](U a, U b) { return (a - b) & 0xffff; }>);
    add("v_subrev_u16", binary<[](U a, U b) { return (b - a) & 0xffff; }>);
    add("v_min_u16", binary<[](U a, U b) { return std::min(a & 0xffff, b & 0xffff); }>);
    add("v_mul_lo_u16", binary<[](U a, U b) { return (a * b) & 0xffff; }>);
    add("v_lshlrev_b16", binary<[](U a, U b) { return (b << (a & 15)) & 0xffff; }>);
    add("v_lshrrev_b16", binary<[](U a, U b) { return ((b & 0xffff) >> (a & 15)); }>);
    add("v_bcnt_u32_b32", binary<[](U a, U b) { return static_cast<U>(std::popcount(a)) + b; }>);
    add("v_bfm_b32", binary<[](U a, U b) { return ((1u << (a & 31)) - 1) << (b & 31); }>);
    add("v_pack_b32_f16", binary<[](U a, U b) { return (a & 0xffff) | b << 16; }>);
    add("v_add3_u32", ternary<[](U a, U b, U c) { return a + b + c; }>);
    add("v_or3_b32", ternary<[](U a, U b, U c) { return a | b | c; }>);
    add("v_lshl_add_u32", ternary<[](U a, U b, U c) { return (a << (b & 31)) + c; }>);
    add("v_add_lshl_u32", ternary<[](U a, U b, U c) { return (a + b) << (c & 31); }>);
    add("v_lshl_or_b32", ternary<[](U a, U b, U c) { return a << (b & 31) | c; }>);
    add("v_and_or_b32", ternary<[](U a, U b, U c) { return (a & b) | c; }>);
    add("v_xad_u32", ternary<[](U a, U b, U c) { return (a ^ b) + c; }>);
    add("v_bfi_b32", ternary<[](U a, U b, U c) { return (a & b) | (~a & c); }>);
    add("v_bfe_u32", ternary<[](U a, U b, U c) {
            const U n = c & 31;
            return (a >> (b & 31) & ((1u << n) - 1));
        }>);
    add("v_bfe_i32", ternary<extract_signed>);
    add("v_alignbit_b32",
        ternary<[](U a, U b, U c) { return static_cast<U>((UU{a} << 32 | b) >> (c & 31)); }>);
    add("v_alignbyte_b32",
        ternary<[](U a, U b, U c) { return static_cast<U>((UU{a} << 32 | b) >> (8 * (c & 3))); }>);
    add("v_perm_b32", ternary<pick_bytes>);
    add("v_mad_u32_u24", ternary<[](U a, U b, U c) { return low24(a) * low24(b) + c; }>);
    add("v_mad_i32_i24",
        ternary<[](U a, U b, U c) { return (static_cast<U>(signed24(a) * signed24(b)) + c); }>);
    add("v_max3_u32", ternary<most>);
    add("v_min3_u32", ternary<least>);
    add("v_cndmask_b32", select);
    add("v_mad_u64_u32", mad_64_32<false>);
    add("v_mad_i64_i32", mad_64_32<true>);
    add("v_lshl_add_u64", [](Wave& w, In in) {
        auto a = wide(w, in, 1);
        const Lanes by = w.lanes(in, 2);
        const auto b = wide(w, in, 3);
        for (int i = 0; i < kLanes; ++i) a[i] = (a[i] << (by[i] & 7)) + b[i];
        set_wide(w, in, a);
    });
    add("v_lshlrev_b64", shift_wide<[](UU a, U n) { return a << n; }>);
    add("v_lshrrev_b64", shift_wide<[](UU a, U n) { return (a >> n); }>);
    add("v_ashrrev_i64",
        shift_wide<[](UU a, U n) { return (static_cast<UU>(static_cast<int64_t>(a) >> n)); }>);
    add("v_add_co_u32", with_carry<[](UU a, UU b, UU) { return a + b; }, false>);
    add("v_addc_co_u32", with_carry<[](UU a, UU b, UU c) { return a + b + c; }, true>);
    add("v_sub_co_u32", with_carry<[](UU a, UU b, UU) { return a - b; }, false>);
    add("v_subb_co_u32", with_carry<[](UU a, UU b, UU c) { return a - b - c; }, true>);
    add("v_subrev_co_u32", with_carry<[](UU a, UU b, UU) { return b - a; }, false>);
    add("v_subbrev_co_u32", with_carry<[](UU a, UU b, UU c) { return b - a - c; }, true>);
    add("v_mbcnt_lo_u32_b32", count_lanes<0>);
    add("v_mbcnt_hi_u32_b32", count_lanes<1>);
    add("v_readfirstlane_b32", [](Wave& w, In in) {
        const int lane = w.exec() == 0 ? 0 : std::countr_zero(w.exec());
        w.set_scalar(in.at[0], w.lanes(in, 1)[lane]);
    });
    add("v_readlane_b32",
        [](Wave& w, In in) { w.set_scalar(in.at[0], w.lanes(in, 1)[w.scalar(in.at[2]) & 63]); });
    add("v_writelane_b32", [](Wave& w, In in) {
        w.v[w.place(in.at[0])][w.scalar(in.at[2]) & 63] = w.scalar(in.at[1]);
    });
    add("v_pk_mov_b32", [](Wave& w, In in) {
        const Lanes low = w.lanes(in, 1, in.op_sel & 1), high = w.lanes(in, 2, in.op_sel >> 1 & 1);
        w.set_lanes(in, in.at[0], low, 0);
        w.set_lanes(in, in.at[0], high, 1);
    });
    add("v_pk_lshlrev_b16", packed_words<[](U a, U b) { return b << (a & 15); }>);
    add("v_pk_lshrrev_b16", packed_words<[](U a, U b) { return (b >> (a & 15)); }>);
    add("v_pk_sub_i16", packed_words<[](U a, U b) { return a - b; }>);
    add("v_nop", [](Wave&, In) {});

    const auto add_compare = [&]<class T>(T, const std::string& type) {
        const auto one = [&](const char* name, Handler run) {
            all[std::string("v_cmp_") + name + "_" + type] = {run, Unit::kVector};
        };
        one("eq", compare<T, [](T a, T b) { return a == b; }>);
        one("ne", compare<T, [](T a, T b) { return a != b; }>);
        one("lt", compare<T, [](T a, T b) { return a < b; }>);
        one("le", compare<T, [](T a, T b) { return a <= b; }>);
        one("gt", compare<T, [](T a, T b) { return (a > b); }>);
        one("ge", compare<T, [](T a, T b) { return (a >= b); }>);
    };
    add_compare(uint16_t{}, "u16");
    add_compare(int16_t{}, "i16");
    add_compare(uint32_t{}, "u32");
    add_compare(int32_t{}, "i32");
    add_compare(uint64_t{}, "u64");
    add_compare(int64_t{}, "i64");
}

}  // namespace gcn
