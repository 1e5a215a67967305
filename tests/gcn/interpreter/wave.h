// A wave: 64 lanes that run one instruction after another, with what it has under way.
#pragma once

#include <bit>
#include <deque>
#include <vector>

#include "program.h"

namespace gcn {

class Machine;
using Time = int64_t;  // picoseconds

constexpr int kNumVectors = 512;

using Lanes = std::array<uint32_t, kLanes>;

// The waves of a block share its memory and its barrier. A block has a compute unit to itself.
struct Block {
    int rank = 0, die = 0, launch = 0;
    uint32_t number = 0;
    std::vector<uint8_t> shared;
    std::vector<Wave*> waves;
    int num_waiting = 0, num_running = 0;
    Time barrier_time = 0;
    std::array<Time, 4> unit_free = {};  // the four units that issue its vector instructions
    int level1 = 0;                      // its L1 cache's number
    Time shared_free = 0;
};

// An access that counts in vmcnt or lgkmcnt until it is done.
struct Pending {
    uint64_t id = 0;
    bool counts_vector = false, counts_other = false, is_scalar = false;
    bool is_done = false;
    int first = -1, num = 0;  // registers that it will write
};

struct Wave {
    Machine* machine = nullptr;
    const Program* program = nullptr;
    const Kernel* kernel = nullptr;
    Block* block = nullptr;
    int number = 0;
    uint32_t pc = 0;
    Time now = 0;
    bool scc = false, has_ended = false, waits_at_barrier = false, waits_for_counters = false;
    std::array<uint32_t, kNumScalars> s = {};
    std::vector<Lanes> v;
    std::vector<std::vector<uint8_t>> scratch;  // of each lane
    // Set by s_set_gpr_idx_on: what is added to the numbers of a move's registers.
    uint32_t index = 0;
    bool indexes_source = false, indexes_result = false;
    // In the order of issue.
    std::deque<Pending> pending;
    // Registers that an access has yet to write and that no s_waitcnt has waited for.
    std::array<uint8_t, kNumVectors> awaited_v = {};
    std::array<uint8_t, kNumScalars> awaited_s = {};
    // Lines that accesses under way touch, and when the last one arrives: accesses of a wave to one
    // address stay in order.
    std::vector<std::pair<uint64_t, Time>> lines;
    Time last_shared = 0;  // when the last access to block-shared memory takes place
    Time last_arrival = 0;
    uint64_t executed = 0;

    uint64_t exec() const { return pair(kExec); }
    uint64_t pair(int reg) const { return s[reg] | uint64_t{s[reg + 1]} << 32; }
    void set_pair(int reg, uint64_t value) {
        s[reg] = static_cast<uint32_t>(value);
        s[reg + 1] = static_cast<uint32_t>(value >> 32);
    }
    bool is_active(int lane) const { return (exec() >> lane & 1) != 0; }

    // A scalar operand of 32 or 64 bits.
    uint32_t scalar(const Operand& from) const;
    uint64_t scalar64(const Operand& from) const;
    void set_scalar(const Operand& to, uint32_t value);
    void set_scalar64(const Operand& to, uint64_t value);
    // The lanes of an operand; word k of a wider one. Applies DPP, SDWA, and signs of floats.
    Lanes lanes(const Instruction& in, int operand, int word = 0) const;
    void set_lanes(const Instruction& in, const Operand& to, const Lanes& values, int word = 0);
    // Where the registers of an operand stand in v.
    int place(const Operand& operand) const {
        const int first =
            operand.kind == Operand::Kind::kAccumulator ? kernel->first_accumulator : 0;
        return checked(first + operand.reg, operand.count);
    }
    // Throws unless the wave has these registers.
    int checked(int place, int num) const {
        if (static_cast<size_t>(place + num) > v.size()) throw Error("has no such register");
        return place;
    }
    void check_vector(int place, int num) const;
    void check_scalar(int reg, int num) const;
    std::string name() const;
};

// Registers ISA's handlers by name.
void add_scalar_opcodes(std::map<std::string, Opcode, std::less<>>& all);
void add_vector_opcodes(std::map<std::string, Opcode, std::less<>>& all);
void add_float_opcodes(std::map<std::string, Opcode, std::less<>>& all);
void add_memory_opcodes(std::map<std::string, Opcode, std::less<>>& all);

}  // namespace gcn
