#include "program.h"

#include <bit>
#include <cstdlib>
#include <cstring>

namespace gcn {
namespace {

std::string_view trimmed(std::string_view text) {
    const auto begin = text.find_first_not_of(" \t");
    if (begin == text.npos) return {};
    return text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// At `mark`, but not inside of brackets.
std::vector<std::string_view> split(std::string_view text, char mark) {
    std::vector<std::string_view> parts;
    int depth = 0;
    size_t begin = 0;
    for (size_t i = 0; i <= text.size(); ++i) {
        const char c = i < text.size() ? text[i] : mark;
        if (c == '[' || c == '(') ++depth;
        if (c == ']' || c == ')') --depth;
        if (c != mark || depth != 0) continue;
        const auto part = trimmed(text.substr(begin, i - begin));
        if (!part.empty()) parts.push_back(part);
        begin = i + 1;
    }
    return parts;
}

bool is_integer(std::string_view text) {
    if (text.starts_with('-')) text.remove_prefix(1);
    if (text.starts_with("0x")) {
        return text.size() > 2 && text.find_first_not_of("0123456789abcdef", 2) == text.npos;
    }
    return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
}

int64_t integer(std::string_view text) {
    if (!is_integer(text)) throw Error("not a number: " + std::string(text));
    const std::string copy(text);
    return copy[0] == '-' ? std::strtoll(copy.c_str(), nullptr, 0)
                          : static_cast<int64_t>(std::strtoull(copy.c_str(), nullptr, 0));
}

// "v7", "v[4:7]"; false if `text` is no register of this letter.
bool parse_register(std::string_view text, char letter, Operand& out) {
    if (text.size() < 2 || text[0] != letter) return false;
    text.remove_prefix(1);
    if (text[0] != '[') {
        if (!is_integer(text)) return false;
        out.reg = static_cast<uint16_t>(integer(text));
        return true;
    }
    const auto ends = split(text.substr(1, text.size() - 2), ':');
    out.reg = static_cast<uint16_t>(integer(ends.at(0)));
    out.count = static_cast<uint8_t>(integer(ends.at(1)) - out.reg + 1);
    return true;
}

Operand parse_operand(std::string_view text) {
    using Kind = Operand::Kind;
    Operand out;
    out.text = text;
    const bool is_number = is_integer(text);
    if (!is_number && text.starts_with('-') && text.size() > 1 &&
        (text[1] == 'v' || text[1] == 's' || text[1] == '|')) {
        out.negated = true;
        text.remove_prefix(1);
    }
    if (text.starts_with("sext(") && text.ends_with(')')) {
        out.extends = true;
        text = text.substr(5, text.size() - 6);
    }
    if (text.starts_with('|') && text.ends_with('|')) {
        out.absolute = true;
        text = text.substr(1, text.size() - 2);
    }
    struct Named {
        std::string_view name;
        uint16_t reg;
        uint8_t count;
    };
    constexpr Named kNamed[] = {{"vcc", kVcc, 2},        {"vcc_lo", kVcc, 1},
                                {"vcc_hi", kVcc + 1, 1}, {"exec", kExec, 2},
                                {"exec_lo", kExec, 1},   {"exec_hi", kExec + 1, 1},
                                {"m0", kM0, 1}};
    for (const Named& each : kNamed) {
        if (text != each.name) continue;
        out.kind = Kind::kScalar;
        out.reg = each.reg;
        out.count = each.count;
        return out;
    }
    if (text == "off") {
        out.kind = Kind::kOff;
    } else if (is_number) {
        out.kind = Kind::kValue;
        out.value = static_cast<uint64_t>(integer(text));
    } else if (parse_register(text, 's', out)) {
        out.kind = Kind::kScalar;
    } else if (parse_register(text, 'v', out)) {
        out.kind = Kind::kVector;
    } else if (parse_register(text, 'a', out)) {
        out.kind = Kind::kAccumulator;
    } else if (text == "src_private_base" || text == "src_shared_base") {
        out.kind = Kind::kValue;
        out.value = uint64_t{text == "src_shared_base" ? kSharedBase : kPrivateBase} << 32;
    } else if (text.find('.') != text.npos && text.find_first_not_of("-0123456789.") == text.npos) {
        out.kind = Kind::kValue;
        out.is_float = true;
        out.value = std::bit_cast<uint32_t>(std::strtof(std::string(text).c_str(), nullptr));
    }
    // A label, or what an instruction knows: its text.
    return out;
}

Part parse_part(std::string_view name) {
    constexpr std::string_view kNames[] = {"DWORD",  "BYTE_0", "BYTE_1", "BYTE_2",
                                           "BYTE_3", "WORD_0", "WORD_1"};
    for (int i = 0; i < 7; ++i) {
        if (name == kNames[i]) return static_cast<Part>(i);
    }
    throw Error("not a part of a register: " + std::string(name));
}

// "[1,0,1]": bit i is entry i.
uint8_t parse_bits(std::string_view text) {
    uint8_t bits = 0;
    const auto entries = split(text.substr(1, text.size() - 2), ',');
    for (size_t i = 0; i < entries.size(); ++i)
        bits |= static_cast<uint8_t>(integer(entries[i]) << i);
    return bits;
}

void parse_modifier(std::string_view text, Instruction& out) {
    const auto colon = text.find(':');
    const auto name = text.substr(0, colon);
    const auto value = colon == text.npos ? std::string_view{} : text.substr(colon + 1);
    if (name == "sc0")
        out.sc0 = true;
    else if (name == "sc1")
        out.sc1 = true;
    else if (name == "nt")
        out.nt = true;
    else if (name == "offset" || name == "offset0")
        out.offset = static_cast<int32_t>(integer(value));
    else if (name == "offset1")
        out.offset1 = static_cast<int32_t>(integer(value));
    else if (name == "quad_perm") {
        out.dpp = Dpp::kQuad;
        const auto lanes = split(value.substr(1, value.size() - 2), ',');
        for (int i = 0; i < 4; ++i) out.quad[i] = static_cast<uint8_t>(integer(lanes.at(i)));
    } else if (name == "row_half_mirror")
        out.dpp = Dpp::kMirrorHalfRow;
    else if (name == "row_mirror")
        out.dpp = Dpp::kMirrorRow;
    else if (text == "row_bcast:15")
        out.dpp = Dpp::kToNextRow;
    else if (text == "row_bcast:31")
        out.dpp = Dpp::kToUpperRows;
    else if (text == "row_mask:0xf" || text == "bank_mask:0xf") {
    } else if (name == "dst_sel")
        out.result = parse_part(value);
    else if (text == "dst_unused:UNUSED_PAD") {
    } else if (text == "dst_unused:UNUSED_PRESERVE")
        out.preserves = true;
    else if (name == "src0_sel")
        out.at[1].part = parse_part(value);
    else if (name == "src1_sel")
        out.at[2].part = parse_part(value);
    else if (name == "op_sel")
        out.op_sel = parse_bits(value);
    else if (name == "op_sel_hi")
        out.op_sel_hi = parse_bits(value);
    else if (name == "neg_lo")
        out.neg_lo = parse_bits(value);
    else if (name == "neg_hi")
        out.neg_hi = parse_bits(value);
    else
        throw Error("unknown modifier " + std::string(text));
}

// The names of an instruction's encodings mean the same.
std::string_view without_encoding(std::string_view name) {
    for (const std::string_view end : {"_e32", "_e64", "_dpp", "_sdwa"}) {
        if (name.ends_with(end)) name.remove_suffix(end.size());
    }
    return name;
}
}  // namespace
Program::Program(std::string text) : text_(std::move(text)) {
    std::string_view rest = text_;
    int number = 0;
    while (!rest.empty()) {
        const auto end = std::min(rest.find('\n'), rest.size());
        const auto line = rest.substr(0, end);
        rest.remove_prefix(std::min(end + 1, rest.size()));
        ++number;
        try {
            parse_line(line);
        } catch (const std::exception& error) {
            throw Error("line " + std::to_string(number) + ": " + std::string(trimmed(line)) +
                        ": " + error.what());
        }
    }
    resolve();
    parse_kernels();
}

const Kernel& Program::kernel(const std::string& name) const {
    const auto found = kernels_.find(name);
    if (found == kernels_.end()) throw Error("no kernel " + name);
    return found->second;
}

void Program::parse_line(std::string_view line) {
    line = trimmed(line.substr(0, line.find(';')));
    if (line.empty()) return;
    if (line == ".text") section_ = Section::kCode;
    if (line.starts_with(".section"))
        section_ = line.find(".rodata") != line.npos  ? Section::kConstants
                   : line.find(".text.") != line.npos ? Section::kCode
                                                      : Section::kOther;
    if (section_ == Section::kConstants) parse_constant(line);
    if (section_ != Section::kCode) return;
    if (line.ends_with(':') && line.find(' ') == line.npos) {
        labels_.emplace(line.substr(0, line.size() - 1), static_cast<uint32_t>(code_.size()));
        return;
    }
    const auto space = std::min(line.find_first_of(" \t"), line.size());
    auto name = line.substr(0, space);
    const bool is_instruction = name.starts_with("s_") || name.starts_with("v_") ||
                                name.starts_with("ds_") || name.starts_with("flat_") ||
                                name.starts_with("global_") || name.starts_with("scratch_") ||
                                name.starts_with("buffer_");
    if (!is_instruction) return;
    Instruction out;
    out.line = line;
    out.name = without_encoding(name);
    const std::string_view clamp = line.ends_with(" clamp") ? " clamp" : "";
    line.remove_suffix(clamp.size());
    const Opcode* const opcode = find_opcode(std::string(out.name).append(clamp));
    if (opcode == nullptr) throw Error("unknown instruction " + std::string(name));
    out.run = opcode->run;
    out.unit = opcode->unit;
    if (out.name.starts_with("v_fma_mix")) out.op_sel_hi = 0;
    const auto arguments = trimmed(line.substr(space));
    if (out.name == "s_waitcnt") {
        for (const auto each : split(arguments, ' ')) {
            const auto open = each.find('(');
            const auto counter = each.substr(0, open);
            const auto most = integer(each.substr(open + 1, each.size() - open - 2));
            if (counter == "vmcnt")
                out.vmcnt = static_cast<uint8_t>(most);
            else if (counter == "lgkmcnt")
                out.lgkmcnt = static_cast<uint8_t>(most);
            else if (counter != "expcnt")
                throw Error("unknown counter");
        }
    } else if (out.name.starts_with("buffer_")) {
        for (const auto each : split(arguments, ' ')) parse_modifier(each, out);
    } else {
        std::vector<std::string_view> modifiers;
        for (const auto each : split(arguments, ',')) {
            auto words = split(each, ' ');
            if (out.num == out.at.size()) throw Error("too many operands");
            out.at[out.num++] = parse_operand(words[0]);
            modifiers.insert(modifiers.end(), words.begin() + 1, words.end());
        }
        for (const auto each : modifiers) parse_modifier(each, out);
    }
    const bool may_lack_source = out.dpp == Dpp::kToNextRow || out.dpp == Dpp::kToUpperRows;
    if (may_lack_source && out.name != "v_mov_b32") throw Error("more than a move by DPP");
    code_.push_back(out);
}

// A line of a section of constants. The descriptors of kernels stand there, too.
void Program::parse_constant(std::string_view line) {
    if (line.ends_with(':') && line.find(' ') == line.npos) {
        constant_labels_.emplace(line.substr(0, line.size() - 1),
                                 static_cast<uint32_t>(constants_.size()));
        return;
    }
    const auto space = std::min(line.find_first_of(" \t"), line.size());
    const auto name = line.substr(0, space);
    const auto value = trimmed(line.substr(space));
    constexpr std::pair<std::string_view, size_t> kSizes[] = {
        {".byte", 1}, {".short", 2}, {".long", 4}, {".quad", 8}};
    for (const auto& [directive, bytes] : kSizes) {
        if (name != directive) continue;
        const auto word = static_cast<uint64_t>(integer(value));
        const auto* const first = reinterpret_cast<const uint8_t*>(&word);
        constants_.insert(constants_.end(), first, first + bytes);
        return;
    }
    if (name == ".zero") {
        constants_.resize(constants_.size() + static_cast<size_t>(integer(value)));
    } else if (name == ".p2align") {
        const auto unit = size_t{1} << integer(value.substr(0, value.find(',')));
        constants_.resize((constants_.size() + unit - 1) / unit * unit);
    } else if (!name.starts_with(".amdhsa_") && name != ".end_amdhsa_kernel" &&
               name != ".section" && name != ".type" && name != ".size" && name != ".globl" &&
               name != ".protected" && name != ".weak") {
        throw Error("unknown constant");
    }
}

// Finds where branches go, and the distances of calls and constants.
void Program::resolve() {
    const auto target_of = [&](std::string_view label) {
        const auto found = labels_.find(label);
        if (found == labels_.end()) throw Error("no label " + std::string(label));
        return found->second;
    };
    uint32_t here = 0;  // what the last s_getpc_b64 returns
    for (uint32_t i = 0; i < code_.size(); ++i) {
        Instruction& each = code_[i];
        if (each.name == "s_getpc_b64") here = i + 1;
        if (each.name.starts_with("s_cbranch") || each.name == "s_branch") {
            each.target = target_of(each.at[0].text);
        }
        for (uint8_t k = 0; k < each.num; ++k) {
            const auto symbol = each.at[k].text;
            const auto at = symbol.find("@rel32@");
            if (at == symbol.npos) continue;
            const auto label = symbol.substr(0, at);
            const auto constant = constant_labels_.find(label);
            // In instructions, as this machine counts code; or to an address, plus its offset.
            const int64_t to =
                constant == constant_labels_.end()
                    ? int64_t{target_of(label)}
                    : reinterpret_cast<int64_t>(constants_.data() + constant->second);
            const bool is_low = symbol.substr(at + 7, 2) == "lo";
            const auto offset = integer(symbol.substr(symbol.rfind('+') + 1)) - (is_low ? 4 : 12);
            if (offset != 0 && constant == constant_labels_.end()) throw Error("offset into code");
            const int64_t distance = to + offset - int64_t{here};
            each.at[k].kind = Operand::Kind::kValue;
            each.at[k].value = static_cast<uint32_t>(is_low ? distance : distance >> 32);
        }
    }
}

// What the metadata of the code object says, which is YAML, but always in the same form.
void Program::parse_kernels() {
    const std::string_view text = text_;
    const auto number_behind = [](std::string_view block, std::string_view key) -> uint32_t {
        const auto at = block.find(key);
        if (at == block.npos) throw Error("no " + std::string(key));
        const auto rest = trimmed(block.substr(at + key.size(), 40));
        return static_cast<uint32_t>(integer(rest.substr(0, rest.find_first_of(" \t\n"))));
    };
    for (size_t at = 0; (at = text.find(".amdhsa_kernel ", at)) != text.npos;) {
        const auto block = text.substr(at, text.find(".end_amdhsa_kernel", at) - at);
        const std::string name(block.substr(15, block.find('\n') - 15));
        Kernel& kernel = kernels_[name];
        kernel.entry = labels_.at(name);
        kernel.shared_bytes = number_behind(block, "group_segment_fixed_size ");
        kernel.private_bytes = number_behind(block, "private_segment_fixed_size ");
        kernel.num_vectors = number_behind(block, "amdhsa_next_free_vgpr ");
        kernel.first_accumulator = number_behind(block, "amdhsa_accum_offset ");
        kernel.argument_bytes = number_behind(block, "amdhsa_kernarg_size ");
        for (const std::string_view round :
             {"amdhsa_float_round_mode_32 ", "amdhsa_float_round_mode_16_64 "}) {
            if (number_behind(block, round) != 0) throw Error("does not round to nearest");
        }
        for (const std::string_view denorm :
             {"amdhsa_float_denorm_mode_32 ", "amdhsa_float_denorm_mode_16_64 "}) {
            if (number_behind(block, denorm) != 3) throw Error("does not keep denormals");
        }
        kernel.explicit_bytes = kernel.argument_bytes;
        at += block.size();
    }
    for (size_t at = text.find(".amdgpu_metadata");
         (at = text.find("- .agpr_count:", at)) != text.npos;) {
        const auto block = text.substr(at, text.find("- .agpr_count:", at + 1) - at);
        at += 10;
        const auto name_at = block.find("\n    .name:");
        const auto rest =
            trimmed(block.substr(name_at + 11, block.find('\n', name_at + 1) - name_at - 11));
        Kernel& kernel = kernels_.at(std::string(rest));
        for (size_t k = 0; (k = block.find("- .offset:", k)) != block.npos; k += 10) {
            const auto entry =
                block.substr(k, std::min(block.find("- .offset:", k + 1), block.size()) - k);
            const auto kind_at = entry.find(".value_kind:");
            if (kind_at == entry.npos) throw Error("an argument without a kind");
            const auto kind =
                trimmed(entry.substr(kind_at + 12, entry.find('\n', kind_at) - kind_at - 12));
            if (!kind.starts_with("hidden_")) continue;
            const uint32_t offset = number_behind(entry, ".offset:");
            kernel.hidden.emplace(std::string(kind), offset);
            kernel.explicit_bytes = std::min(kernel.explicit_bytes, offset);
        }
    }
}

}  // namespace gcn
