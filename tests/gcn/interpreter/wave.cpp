#include "wave.h"

namespace gcn {

const Opcode* find_opcode(std::string_view name) {
    static const auto all = [] {
        std::map<std::string, Opcode, std::less<>> opcodes;
        add_scalar_opcodes(opcodes);
        add_vector_opcodes(opcodes);
        add_float_opcodes(opcodes);
        add_memory_opcodes(opcodes);
        return opcodes;
    }();
    const auto found = all.find(name);
    return found == all.end() ? nullptr : &found->second;
}

std::string Wave::name() const {
    return "rank " + std::to_string(block->rank) + ", block " + std::to_string(block->number) +
           ", wave " + std::to_string(number);
}

// The hardware does not wait for an access before it reads a register that the access writes.
void Wave::check_vector(int place, int num) const {
    for (int i = place; i < place + num; ++i) {
        if (awaited_v[i] != 0)
            throw Error("reads v" + std::to_string(i) + ", which no s_waitcnt waited for");
    }
}

void Wave::check_scalar(int reg, int num) const {
    for (int i = reg; i < reg + num; ++i) {
        if (awaited_s[i] != 0)
            throw Error("reads s" + std::to_string(i) + ", which no s_waitcnt waited for");
    }
}

uint32_t Wave::scalar(const Operand& from) const {
    if (from.kind == Operand::Kind::kValue) return static_cast<uint32_t>(from.value);
    if (from.kind != Operand::Kind::kScalar) throw Error("not a scalar: " + std::string(from.text));
    check_scalar(from.reg, 1);
    return s[from.reg];
}

uint64_t Wave::scalar64(const Operand& from) const {
    if (from.kind == Operand::Kind::kValue) return from.value;
    if (from.kind != Operand::Kind::kScalar) throw Error("not a scalar: " + std::string(from.text));
    check_scalar(from.reg, 2);
    return pair(from.reg);
}

void Wave::set_scalar(const Operand& to, uint32_t value) {
    if (to.kind != Operand::Kind::kScalar) throw Error("not a scalar: " + std::string(to.text));
    s[to.reg] = value;
}

void Wave::set_scalar64(const Operand& to, uint64_t value) {
    if (to.kind != Operand::Kind::kScalar) throw Error("not a scalar: " + std::string(to.text));
    set_pair(to.reg, value);
}

namespace {

// The lane that a move by DPP takes lane i's value from; -1: lane i keeps its own.
int source_of(const Instruction& in, int i) {
    switch (in.dpp) {
        case Dpp::kQuad: return (i & ~3) | in.quad[i & 3];
        case Dpp::kMirrorHalfRow: return i ^ 7;
        case Dpp::kMirrorRow: return i ^ 15;
        case Dpp::kToNextRow: return i < 16 ? -1 : (i / 16) * 16 - 1;
        case Dpp::kToUpperRows: return i < 32 ? -1 : 31;
        case Dpp::kNone: break;
    }
    return i;
}

struct Bits {
    int first, num;
};

Bits bits_of(Part part) {
    switch (part) {
        case Part::kDword: return {0, 32};
        case Part::kWord0: return {0, 16};
        case Part::kWord1: return {16, 16};
        default: return {8 * (static_cast<int>(part) - 1), 8};
    }
}

uint32_t part_of(uint32_t word, const Operand& from) {
    const Bits bits = bits_of(from.part);
    const uint32_t above = word << (32 - bits.first - bits.num);
    return from.extends ? static_cast<uint32_t>(static_cast<int32_t>(above) >> (32 - bits.num))
                        : above >> (32 - bits.num);
}

}  // namespace

Lanes Wave::lanes(const Instruction& in, int operand, int word) const {
    const Operand& from = in.at[operand];
    Lanes out;
    if (from.kind == Operand::Kind::kVector || from.kind == Operand::Kind::kAccumulator) {
        const int at = place(from) + word + (indexes_source && operand == 1 ? index : 0);
        check_vector(at, 1);
        out = v[at];
        if (in.dpp != Dpp::kNone && operand == 1) {
            const Operand& to = in.at[0];
            const Lanes source = out;
            for (int i = 0; i < kLanes; ++i) {
                const int lane = source_of(in, i);
                // As the hardware does: nothing comes from a lane that is not active.
                out[i] = lane < 0 || !is_active(lane) ? v[place(to)][i] : source[lane];
            }
        }
    } else if (from.kind == Operand::Kind::kValue) {
        out.fill(static_cast<uint32_t>(word == 0 ? from.value : from.value >> 32));
    } else if (from.kind == Operand::Kind::kScalar) {
        check_scalar(from.reg + word, 1);
        out.fill(s[from.reg + word]);
    } else {
        throw Error("not a value: " + std::string(from.text));
    }
    if (from.part != Part::kDword) {
        if (from.absolute || from.negated) throw Error("the sign of a part of a register");
        for (uint32_t& each : out) each = part_of(each, from);
    }
    if (from.absolute) {
        for (uint32_t& each : out) each &= 0x7fffffff;
    }
    if (from.negated) {
        for (uint32_t& each : out) each ^= 0x80000000;
    }
    return out;
}

void Wave::set_lanes(const Instruction& in, const Operand& to, const Lanes& values, int word) {
    const int at = place(to) + word + (indexes_result ? index : 0);
    Lanes& out = v[at];
    const uint64_t mask = exec();
    if (in.result == Part::kDword) {
        if (mask == ~uint64_t{0}) {
            out = values;
            return;
        }
        for (int i = 0; i < kLanes; ++i) {
            if ((mask >> i & 1) != 0) out[i] = values[i];
        }
        return;
    }
    const Bits bits = bits_of(in.result);
    const uint32_t written = (uint32_t{1} << bits.num) - 1;
    for (int i = 0; i < kLanes; ++i) {
        if ((mask >> i & 1) == 0) continue;
        const uint32_t rest = in.preserves ? out[i] & ~(written << bits.first) : 0;
        out[i] = rest | (values[i] & written) << bits.first;
    }
}

}  // namespace gcn
