// Assembly of gfx942 as clang writes it, taken apart once before it runs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gcn {

constexpr int kLanes = 64;

// What is wrong with the assembly, or with the program that it is.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Places in the file of scalar registers that have names.
enum ScalarName { kVcc = 106, kM0 = 124, kExec = 126, kNumScalars = 128 };

// Upper halves of addresses that mean block-shared and private memory to flat instructions. No
// address of the machine that interprets has such a half.
constexpr uint32_t kSharedBase = 0x10000, kPrivateBase = 0x20000;

// What an instruction takes of a register: all, or by SDWA a part.
enum class Part : uint8_t { kDword, kByte0, kByte1, kByte2, kByte3, kWord0, kWord1 };

struct Operand {
    enum class Kind : uint8_t { kNone, kScalar, kVector, kAccumulator, kValue, kOff };
    Kind kind = Kind::kNone;
    uint8_t count = 1;  // registers
    uint16_t reg = 0;
    bool negated = false, absolute = false;
    bool extends = false;  // SDWA's sext(): the part has a sign
    Part part = Part::kDword;
    bool is_float = false;  // a value that was written with a point
    uint64_t value = 0;     // of kValue, as wide as a scalar pair
    std::string_view text;
};

// How a move by DPP finds its source lanes.
enum class Dpp : uint8_t { kNone, kQuad, kMirrorHalfRow, kMirrorRow, kToNextRow, kToUpperRows };

struct Wave;
struct Instruction;
using Handler = void (*)(Wave&, const Instruction&);

// What an instruction keeps busy, and how it waits.
enum class Unit : uint8_t { kScalar, kVector, kSlow, kMatrix, kFlow, kMemory };

struct Instruction {
    Handler run = nullptr;
    Unit unit = Unit::kScalar;
    std::string_view name;  // without _e32, _e64
    std::string_view line;
    std::array<Operand, 6> at;
    uint8_t num = 0;  // operands
    // Modifiers.
    int32_t offset = 0, offset1 = 0;
    bool sc0 = false, sc1 = false, nt = false;
    Dpp dpp = Dpp::kNone;
    std::array<uint8_t, 4> quad = {0, 1, 2, 3};
    Part result = Part::kDword;                                 // SDWA's dst_sel
    bool preserves = false;                                     // SDWA's dst_unused
    uint8_t op_sel = 0, op_sel_hi = 7, neg_lo = 0, neg_hi = 0;  // a bit for each source
    uint8_t vmcnt = 63, lgkmcnt = 15;                           // of s_waitcnt
    uint32_t target = 0;                                        // of branches: an index
};

struct Kernel {
    uint32_t entry = 0;
    uint32_t shared_bytes = 0, private_bytes = 0;
    uint32_t num_vectors = 0, first_accumulator = 0;
    uint32_t explicit_bytes = 0;  // of arguments: the hidden ones follow
    uint32_t argument_bytes = 0;
    std::map<std::string, uint32_t> hidden;  // offsets of hidden arguments
};

class Program {
  public:
    // Throws Error, which names the line, for what it does not know.
    explicit Program(std::string text);
    Program(const Program&) = delete;

    const std::vector<Instruction>& code() const { return code_; }
    const Kernel& kernel(const std::string& name) const;
    // What the code reads and nobody writes; it does not move.
    const std::vector<uint8_t>& constants() const { return constants_; }

  private:
    enum class Section : uint8_t { kCode, kConstants, kOther };

    void parse_line(std::string_view line);
    void parse_constant(std::string_view line);
    void parse_kernels();
    void resolve();

    const std::string text_;
    std::vector<Instruction> code_;
    std::vector<uint8_t> constants_;
    Section section_ = Section::kCode;
    std::map<std::string_view, uint32_t> labels_;           // of code
    std::map<std::string_view, uint32_t> constant_labels_;  // offsets
    std::map<std::string, Kernel, std::less<>> kernels_;
};

struct Opcode {
    Handler run;
    Unit unit;
};
// Null for a name that is not known.
const Opcode* find_opcode(std::string_view name);

}  // namespace gcn
