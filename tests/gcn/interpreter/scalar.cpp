// Scalar instructions, and those that change what runs next.
#include <stdio.h>

#include <algorithm>
#include <string>

#include "machine.h"
#include "wave.h"

namespace gcn {
namespace {

using In = const Instruction&;

template <auto F, bool SETS_SCC = false>
void binary32(Wave& w, In in) {
    const uint32_t result = F(w.scalar(in.at[1]), w.scalar(in.at[2]));
    w.set_scalar(in.at[0], result);
    if constexpr (SETS_SCC) w.scc = result != 0;
}

template <auto F>
void binary64(Wave& w, In in) {
    const uint64_t result = F(w.scalar64(in.at[1]), w.scalar64(in.at[2]));
    w.set_scalar64(in.at[0], result);
    w.scc = result != 0;
}

// exec = F(source, exec); the result gets the old one.
template <auto F>
void save_exec(Wave& w, In in) {
    const uint64_t old = w.exec();
    const uint64_t result = F(w.scalar64(in.at[1]), old);
    w.set_scalar64(in.at[0], old);
    w.set_pair(kExec, result);
    w.scc = result != 0;
}

template <class T, auto F>
void compare(Wave& w, In in) {
    if constexpr (sizeof(T) == 8)
        w.scc = F(static_cast<T>(w.scalar64(in.at[0])), static_cast<T>(w.scalar64(in.at[1])));
    else
        w.scc = F(static_cast<T>(w.scalar(in.at[0])), static_cast<T>(w.scalar(in.at[1])));
}

template <auto F>
void shift64(Wave& w, In in) {
    const uint64_t result = F(w.scalar64(in.at[1]), w.scalar(in.at[2]) & 63);
    w.set_scalar64(in.at[0], result);
    w.scc = result != 0;
}

template <auto F>
void branch_if(Wave& w, In in) {
    if (F(w)) w.pc = in.target;
}

template <int SHIFT>
void shifted_add(Wave& w, In in) {
    const uint64_t sum = (uint64_t{w.scalar(in.at[1])} << SHIFT) + w.scalar(in.at[2]);
    w.set_scalar(in.at[0], static_cast<uint32_t>(sum));
    w.scc = sum >> 32 != 0;
}

// Bits from b[4:0] on, b[22:16] of them.
uint32_t extract(uint32_t a, uint32_t b) {
    const uint32_t num = b >> 16 & 127, bits = a >> (b & 31);
    return num >= 32 ? bits : bits & ((1u << num) - 1);
}

// As extract(), with the last bit as the sign.
uint32_t extract_signed(uint32_t a, uint32_t b) {
    const uint32_t found = extract(a, b), num = b >> 16 & 127;
    if (num == 0 || num >= 32) return num == 0 ? 0 : found;
    const uint32_t sign = 1u << (num - 1);
    return (found ^ sign) - sign;
}

int32_t as_signed(uint32_t value) { return static_cast<int32_t>(value); }

void add_u32(Wave& w, uint64_t sum, const Operand& to) {
    w.set_scalar(to, static_cast<uint32_t>(sum));
    w.scc = sum >> 32 != 0;
}

}  // namespace

void add_scalar_opcodes(std::map<std::string, Opcode, std::less<>>& all) {
    const auto add = [&](const char* name, Handler run) { all[name] = {run, Unit::kScalar}; };
    const auto flow = [&](const char* name, Handler run) { all[name] = {run, Unit::kFlow}; };
    using U = uint32_t;
    using UU = uint64_t;

    add("s_mov_b32", [](Wave& w, In in) { w.set_scalar(in.at[0], w.scalar(in.at[1])); });
    add("s_mov_b64", [](Wave& w, In in) { w.set_scalar64(in.at[0], w.scalar64(in.at[1])); });
    add("s_movk_i32", [](Wave& w, In in) {
        w.set_scalar(in.at[0], static_cast<U>(static_cast<int16_t>(in.at[1].value)));
    });
    add("s_not_b64", [](Wave& w, In in) {
        const UU r = ~w.scalar64(in.at[1]);
        w.set_scalar64(in.at[0], r);
        w.scc = r != 0;
    });
    add("s_not_b32", [](Wave& w, In in) {
        const U r = ~w.scalar(in.at[1]);
        w.set_scalar(in.at[0], r);
        w.scc = r != 0;
    });
    add("s_brev_b32", [](Wave& w, In in) {
        U from = w.scalar(in.at[1]), to = 0;
        for (int i = 0; i < 32; ++i, from >>= 1) to = to << 1 | (from & 1);
        w.set_scalar(in.at[0], to);
    });
    add("s_abs_i32", [](Wave& w, In in) {
        const int32_t a = as_signed(w.scalar(in.at[1]));
        const U r = a < 0 ? 0u - static_cast<U>(a) : static_cast<U>(a);
        w.set_scalar(in.at[0], r);
        w.scc = r != 0;
    });
    add("s_bcnt1_i32_b64", [](Wave& w, In in) {
        const U r = static_cast<U>(std::popcount(w.scalar64(in.at[1])));
        w.set_scalar(in.at[0], r);
        w.scc = r != 0;
    });
    add("s_ff1_i32_b32", [](Wave& w, In in) {
        const U a = w.scalar(in.at[1]);
        w.set_scalar(in.at[0], a == 0 ? ~0u : static_cast<U>(std::countr_zero(a)));
    });
    add("s_ff1_i32_b64", [](Wave& w, In in) {
        const UU a = w.scalar64(in.at[1]);
        w.set_scalar(in.at[0], a == 0 ? ~0u : static_cast<U>(std::countr_zero(a)));
    });
    add("s_flbit_i32_b32", [](Wave& w, In in) {
        const U a = w.scalar(in.at[1]);
        w.set_scalar(in.at[0], a == 0 ? ~0u : static_cast<U>(std::countl_zero(a)));
    });
    add("s_sext_i32_i16", [](Wave& w, In in) {
        w.set_scalar(in.at[0], static_cast<U>(static_cast<int16_t>(w.scalar(in.at[1]))));
    });
    add("s_cselect_b32",
        [](Wave& w, In in) { w.set_scalar(in.at[0], w.scalar(in.at[w.scc ? 1 : 2])); });
    add("s_cselect_b64",
        [](Wave& w, In in) { w.set_scalar64(in.at[0], w.scalar64(in.at[w.scc ? 1 : 2])); });

    const auto add_i32 = [](Wave& w, In in) {
        const int64_t sum = int64_t{as_signed(w.scalar(in.at[1]))} + as_signed(w.scalar(in.at[2]));
        w.set_scalar(in.at[0], static_cast<U>(sum));
        w.scc = sum != static_cast<int32_t>(sum);
    };
    add("s_add_i32", add_i32);
    add("s_sub_i32", [](Wave& w, In in) {
        const int64_t sum = int64_t{as_signed(w.scalar(in.at[1]))} - as_signed(w.scalar(in.at[2]));
        w.set_scalar(in.at[0], static_cast<U>(sum));
        w.scc = sum != static_cast<int32_t>(sum);
    });
    add("s_addk_i32", [](Wave& w, In in) {
        const int64_t sum =
            int64_t{as_signed(w.scalar(in.at[0]))} + static_cast<int16_t>(in.at[1].value);
        w.set_scalar(in.at[0], static_cast<U>(sum));
        w.scc = sum != static_cast<int32_t>(sum);
    });
    add("s_mulk_i32", [](Wave& w, In in) {
        w.set_scalar(in.at[0],
                     w.scalar(in.at[0]) * static_cast<U>(static_cast<int16_t>(in.at[1].value)));
    });
    add("s_add_u32",
        [](Wave& w, In in) { add_u32(w, UU{w.scalar(in.at[1])} + w.scalar(in.at[2]), in.at[0]); });
    add("s_addc_u32", [](Wave& w, In in) {
        add_u32(w, UU{w.scalar(in.at[1])} + w.scalar(in.at[2]) + (w.scc ? 1 : 0), in.at[0]);
    });
    add("s_sub_u32",
        [](Wave& w, In in) { add_u32(w, UU{w.scalar(in.at[1])} - w.scalar(in.at[2]), in.at[0]); });
    add("s_subb_u32", [](Wave& w, In in) {
        add_u32(w, UU{w.scalar(in.at[1])} - w.scalar(in.at[2]) - (w.scc ? 1 : 0), in.at[0]);
    });
    add("s_mul_i32", binary32<[](U a, U b) { return a * b; }>);
    add("s_mul_hi_u32", binary32<[](U a, U b) { return static_cast<U>(UU{a} * b >> 32); }>);
    add("s_mul_hi_i32", binary32<[](U a, U b) {
            return static_cast<U>(int64_t{as_signed(a)} * as_signed(b) >> 32);
        }>);
    add("s_lshl1_add_u32", shifted_add<1>);
    add("s_lshl2_add_u32", shifted_add<2>);
    add("s_lshl3_add_u32", shifted_add<3>);
    add("s_lshl4_add_u32", shifted_add<4>);
    add("s_min_u32", [](Wave& w, In in) {
        const U a = w.scalar(in.at[1]), b = w.scalar(in.at[2]);
        w.scc = a < b;
        w.set_scalar(in.at[0], w.scc ? a : b);
    });
    add("s_max_u32", [](Wave& w, In in) {
        const U a = w.scalar(in.at[1]), b = w.scalar(in.at[2]);
        w.scc = a > b;
        w.set_scalar(in.at[0], w.scc ? a : b);
    });
    add("s_min_i32", [](Wave& w, In in) {
        const U a = w.scalar(in.at[1]), b = w.scalar(in.at[2]);
        w.scc = as_signed(a) < as_signed(b);
        w.set_scalar(in.at[0], w.scc ? a : b);
    });
    add("s_max_i32", [](Wave& w, In in) {
        const U a = w.scalar(in.at[1]), b = w.scalar(in.at[2]);
        w.scc = as_signed(a) > as_signed(b);
        w.set_scalar(in.at[0], w.scc ? a : b);
    });
    add("s_and_b32", binary32<[](U a, U b) { return a & b; }, true>);
    add("s_or_b32", binary32<[](U a, U b) { return a | b; }, true>);
    add("s_xor_b32", binary32<[](U a, U b) { return a ^ b; }, true>);
    add("s_andn2_b32", binary32<[](U a, U b) { return a & ~b; }, true>);
    add("s_orn2_b32", binary32<[](U a, U b) { return a | ~b; }, true>);
    add("s_lshl_b32", binary32<[](U a, U b) { return a << (b & 31); }, true>);
    add("s_lshr_b32", binary32<[](U a, U b) { return (a >> (b & 31)); }, true>);
    add("s_ashr_i32",
        binary32<[](U a, U b) { return (static_cast<U>(as_signed(a) >> (b & 31))); }, true>);
    add("s_bfm_b32", binary32<[](U a, U b) { return ((1u << (a & 31)) - 1) << (b & 31); }>);
    add("s_bfe_u32", binary32<extract, true>);
    add("s_bfe_i32", binary32<extract_signed, true>);
    add("s_pack_ll_b32_b16", binary32<[](U a, U b) { return (a & 0xffff) | b << 16; }>);
    add("s_and_b64", binary64<[](UU a, UU b) { return a & b; }>);
    add("s_or_b64", binary64<[](UU a, UU b) { return a | b; }>);
    add("s_xor_b64", binary64<[](UU a, UU b) { return a ^ b; }>);
    add("s_andn2_b64", binary64<[](UU a, UU b) { return a & ~b; }>);
    add("s_orn2_b64", binary64<[](UU a, UU b) { return a | ~b; }>);
    add("s_nor_b64", binary64<[](UU a, UU b) { return ~(a | b); }>);
    add("s_nand_b64", binary64<[](UU a, UU b) { return ~(a & b); }>);
    add("s_xnor_b64", binary64<[](UU a, UU b) { return ~(a ^ b); }>);
    add("s_lshl_b64", shift64<[](UU a, U n) { return a << n; }>);
    add("s_lshr_b64", shift64<[](UU a, U n) { return (a >> n); }>);
    add("s_ashr_i64",
        shift64<[](UU a, U n) { return (static_cast<UU>(static_cast<int64_t>(a) >> n)); }>);
    add("s_and_saveexec_b64", save_exec<[](UU a, UU e) { return a & e; }>);
    add("s_or_saveexec_b64", save_exec<[](UU a, UU e) { return a | e; }>);
    add("s_xor_saveexec_b64", save_exec<[](UU a, UU e) { return a ^ e; }>);
    add("s_andn2_saveexec_b64", save_exec<[](UU a, UU e) { return a & ~e; }>);
    add("s_bitset0_b32", [](Wave& w, In in) {
        w.set_scalar(in.at[0], w.scalar(in.at[0]) & ~(1u << (w.scalar(in.at[1]) & 31)));
    });
    add("s_bitset1_b32", [](Wave& w, In in) {
        w.set_scalar(in.at[0], w.scalar(in.at[0]) | 1u << (w.scalar(in.at[1]) & 31));
    });
    add("s_bitcmp0_b32",
        [](Wave& w, In in) { w.scc = (w.scalar(in.at[0]) >> (w.scalar(in.at[1]) & 31) & 1) == 0; });
    add("s_bitcmp1_b32",
        [](Wave& w, In in) { w.scc = (w.scalar(in.at[0]) >> (w.scalar(in.at[1]) & 31) & 1) != 0; });

    const auto add_compare = [&]<class T>(T, const std::string& type) {
        const auto one = [&](const char* name, Handler run) {
            all[std::string("s_cmp_") + name + "_" + type] = {run, Unit::kScalar};
            if (sizeof(T) == 4)
                all[std::string("s_cmpk_") + name + "_" + type] = {run, Unit::kScalar};
        };
        one("eq", compare<T, [](T a, T b) { return a == b; }>);
        one("lg", compare<T, [](T a, T b) { return a != b; }>);
        one("lt", compare<T, [](T a, T b) { return a < b; }>);
        one("le", compare<T, [](T a, T b) { return a <= b; }>);
        one("gt", compare<T, [](T a, T b) { return (a > b); }>);
        one("ge", compare<T, [](T a, T b) { return (a >= b); }>);
    };
    add_compare(uint32_t{}, "u32");
    add_compare(int32_t{}, "i32");
    add_compare(uint64_t{}, "u64");

    flow("s_branch", branch_if<[](Wave&) { return true; }>);
    flow("s_cbranch_scc0", branch_if<[](Wave& w) { return !w.scc; }>);
    flow("s_cbranch_scc1", branch_if<[](Wave& w) { return w.scc; }>);
    flow("s_cbranch_vccz", branch_if<[](Wave& w) { return w.pair(kVcc) == 0; }>);
    flow("s_cbranch_vccnz", branch_if<[](Wave& w) { return w.pair(kVcc) != 0; }>);
    flow("s_cbranch_execz", branch_if<[](Wave& w) { return w.exec() == 0; }>);
    flow("s_cbranch_execnz", branch_if<[](Wave& w) { return w.exec() != 0; }>);
    flow("s_getpc_b64", [](Wave& w, In in) { w.set_scalar64(in.at[0], w.pc); });
    flow("s_setpc_b64", [](Wave& w, In in) { w.pc = static_cast<U>(w.scalar64(in.at[0])); });
    flow("s_swappc_b64", [](Wave& w, In in) {
        const auto to = static_cast<U>(w.scalar64(in.at[1]));
        w.set_scalar64(in.at[0], w.pc);
        w.pc = to;
    });
    flow("s_nop", [](Wave&, In) {});
    flow("s_setprio", [](Wave&, In) {});
    flow("s_sleep", [](Wave& w, In in) { w.machine->sleep(w, static_cast<int>(in.at[0].value)); });
    flow("s_barrier", [](Wave& w, In) { w.machine->arrive_at_barrier(w); });
    flow("s_endpgm", [](Wave& w, In) { w.machine->end(w); });
    flow("s_waitcnt", [](Wave& w, In in) { w.machine->wait_for(w, in.vmcnt, in.lgkmcnt); });
    flow("s_memrealtime",
         [](Wave& w, In in) { w.set_scalar64(in.at[0], w.machine->realtime(w.now)); });
    flow("s_memtime", [](Wave& w, In in) { w.set_scalar64(in.at[0], w.machine->cycles(w.now)); });
    flow("s_getreg_b32", [](Wave& w, In in) {
        // Each block has a compute unit to itself, and blocks go to the dies in turn.
        char name[16];
        unsigned first, bits;
        const std::string line(in.line);
        const char* const text = line.c_str() + std::min(line.find("hwreg("), line.size());
        if (sscanf(text, "hwreg(HW_REG_%15[A-Z_], %u, %u)", name, &first, &bits) != 3) {
            throw Error("not a field of a hardware register");
        }
        U place = 0;
        if (name == std::string_view("XCC_ID"))
            place = static_cast<U>(w.block->die % kDies);
        else if (name == std::string_view("HW_ID"))
            place = w.block->number / kDies << 8;  // the unit's first bit
        else
            throw Error("unknown hardware register");
        w.set_scalar(in.at[0], place >> first & ((1u << bits) - 1));
    });
    flow("s_set_gpr_idx_on", [](Wave& w, In in) {
        w.index = w.scalar(in.at[0]) & 0xff;
        w.indexes_source = in.at[1].text.find("SRC0") != std::string_view::npos;
        w.indexes_result = in.at[1].text.find("DST") != std::string_view::npos;
    });
    flow("s_set_gpr_idx_off", [](Wave& w, In) { w.indexes_source = w.indexes_result = false; });
}

}  // namespace gcn
