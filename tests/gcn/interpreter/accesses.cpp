// Instructions that touch memory: what they ask for, and what happens when it takes place.
#include <cstring>

#include "machine.h"

namespace gcn {
namespace {

using In = const Instruction&;
using U = uint32_t;
using UU = uint64_t;
using Space = Access::Space;

enum class Family { kFlat, kGlobal, kScratch, kShared };

Scope scope_of(In in) {
    return in.sc0 && in.sc1 ? Scope::kSystem : in.sc1 ? Scope::kAgent : Scope::kBlock;
}

std::unique_ptr<Access> begin(Wave& w, In in, Access::Kind kind) {
    auto access = std::make_unique<Access>();
    access->kind = kind;
    access->wave = &w;
    access->in = &in;
    access->scope = scope_of(in);
    access->mask = access->result_mask = w.exec();
    return access;
}

UU wide_lane(const Lanes& low, const Lanes& high, int i) { return low[i] | UU{high[i]} << 32; }

// The address of each lane. address: which operand has it; base: which one has the scalar, or -1.
template <Family FAMILY>
void find_addresses(Wave& w, In in, Access& access, int address, int base) {
    const Operand& at = in.at[address];
    const bool is_wide = at.count == 2;
    Lanes low = {}, high = {};
    if (at.kind == Operand::Kind::kVector) {
        low = w.lanes(in, address);
        if (is_wide) high = w.lanes(in, address, 1);
    } else if (at.kind != Operand::Kind::kOff) {
        throw Error("not an address: " + std::string(at.text));
    }
    UU scalar = 0;
    if (base >= 0 && in.at[base].kind != Operand::Kind::kOff) {
        scalar = FAMILY == Family::kScratch ? w.scalar(in.at[base]) : w.scalar64(in.at[base]);
    }
    for (int i = 0; i < kLanes; ++i) {
        UU where = wide_lane(low, high, i) + scalar + static_cast<UU>(int64_t{in.offset});
        Space space = Space::kMemory;
        if (FAMILY == Family::kShared) {
            where = static_cast<U>(low[i] + static_cast<U>(in.offset));
            space = Space::kShared;
        } else if (FAMILY == Family::kScratch) {
            where = static_cast<U>(where);
            space = Space::kPrivate;
        } else if (where >> 32 == kSharedBase || where >> 32 == kPrivateBase) {
            if (FAMILY == Family::kGlobal && w.is_active(i))
                throw Error("a global access to what is not global memory");
            space = where >> 32 == kSharedBase ? Space::kShared : Space::kPrivate;
            where = static_cast<U>(where);
        }
        access.address[i] = where;
        access.space[i] = space;
    }
}

template <Family FAMILY>
void send(Wave& w, std::unique_ptr<Access> access) {
    constexpr bool kVector = FAMILY != Family::kShared;
    constexpr bool kOther = FAMILY == Family::kShared || FAMILY == Family::kFlat;
    w.machine->issue(std::move(access), kVector, kOther);
}

// BYTES: of a word. HALF: 1 the low half of the register, 2 the high one, 0 all of it.
template <Family FAMILY, int WORDS, int BYTES = 4, bool IS_SIGNED = false, int HALF = 0>
void load(Wave& w, In in) {
    auto access = begin(w, in, Access::Kind::kLoad);
    find_addresses<FAMILY>(w, in, *access, 1,
                           FAMILY == Family::kGlobal || FAMILY == Family::kScratch ? 2 : -1);
    access->words = WORDS;
    access->bytes = BYTES;
    access->is_signed = IS_SIGNED;
    access->to_low_half = HALF == 1;
    access->to_high_half = HALF == 2;
    access->result = w.place(in.at[0]);
    if (HALF != 0) access->data[0] = w.v[access->result];
    send<FAMILY>(w, std::move(access));
}

template <Family FAMILY, int WORDS, int BYTES = 4, int HALF = 0>
void store(Wave& w, In in) {
    auto access = begin(w, in, Access::Kind::kStore);
    find_addresses<FAMILY>(w, in, *access, 0,
                           FAMILY == Family::kGlobal || FAMILY == Family::kScratch ? 2 : -1);
    access->words = WORDS;
    access->bytes = BYTES;
    for (int k = 0; k < WORDS; ++k) access->data[k] = w.lanes(in, 1, k);
    if (HALF == 2) {
        for (U& each : access->data[0]) each >>= 16;
    }
    send<FAMILY>(w, std::move(access));
}

// Two places: offset0 and offset1, in units of EACH words times SCALE.
template <int EACH, int SCALE, bool IS_STORE>
void two(Wave& w, In in) {
    auto access = begin(w, in, IS_STORE ? Access::Kind::kStore : Access::Kind::kLoad);
    Instruction plain = in;
    plain.offset = 0;
    find_addresses<Family::kShared>(w, plain, *access, IS_STORE ? 0 : 1, -1);
    access->words = 2 * EACH;
    for (int k = 0; k < 2 * EACH; ++k) {
        access->word_offset[k] =
            (k < EACH ? in.offset : in.offset1) * EACH * 4 * SCALE + k % EACH * 4;
        if (IS_STORE) access->data[k] = w.lanes(in, k < EACH ? 1 : 2, k % EACH);
    }
    if (!IS_STORE) access->result = w.place(in.at[0]);
    send<Family::kShared>(w, std::move(access));
}

UU add_words(UU old, UU a, UU) { return old + a; }
UU or_words(UU old, UU a, UU) { return old | a; }
UU and_words(UU old, UU a, UU) { return old & a; }
UU max_words(UU old, UU a, UU) { return old > a ? old : a; }
UU swap_words(UU, UU a, UU) { return a; }
UU swap_if_equal(UU old, UU a, UU wanted) { return old == wanted ? a : old; }

// RETURNS: block-shared instructions say so in their name, others by sc0.
template <Family FAMILY, UU (*CHANGE)(UU, UU, UU), int WORDS = 1, bool RETURNS = false>
void atomic(Wave& w, In in) {
    auto access = begin(w, in, Access::Kind::kAtomic);
    const bool returns = FAMILY == Family::kShared ? RETURNS : in.sc0;
    const int first = returns ? 1 : 0;
    find_addresses<FAMILY>(w, in, *access, first, FAMILY == Family::kGlobal ? first + 2 : -1);
    access->scope = in.sc1 ? Scope::kSystem : Scope::kAgent;
    access->words = WORDS;
    access->change = CHANGE;
    for (int k = 0; k < WORDS; ++k) {
        access->data[k] = w.lanes(in, first + 1, k);
        if (CHANGE == swap_if_equal) access->compared[k] = w.lanes(in, first + 1, WORDS + k);
    }
    if (returns) access->result = w.place(in.at[0]);
    send<FAMILY>(w, std::move(access));
}

template <int WORDS>
void load_scalars(Wave& w, In in) {
    auto access = begin(w, in, Access::Kind::kLoad);
    const UU offset = in.at[2].kind == Operand::Kind::kValue ? in.at[2].value : w.scalar(in.at[2]);
    access->mask = 0;
    access->scalar_result = in.at[0].reg;
    access->num_scalars = WORDS;
    access->address[0] =
        ((w.scalar64(in.at[1]) + offset) & ~UU{3}) + static_cast<UU>(int64_t{in.offset});
    w.machine->issue(std::move(access), false, true);
}

// A move between lanes through the unit of block-shared memory.
void permute(Wave& w, In in) {
    auto access = begin(w, in, Access::Kind::kLoad);
    const Lanes from = w.lanes(in, 1), values = w.lanes(in, 2);
    access->mask = 0;
    access->result = w.place(in.at[0]);
    for (int i = 0; i < kLanes; ++i) {
        const int lane = static_cast<int>((from[i] + static_cast<U>(in.offset)) / 4 % kLanes);
        access->data[0][i] = w.is_active(lane) ? values[lane] : 0;
    }
    send<Family::kShared>(w, std::move(access));
}

uint8_t* place(Access& access, int lane, int word, std::vector<uint8_t>& bytes) {
    const UU at = access.address[lane] + static_cast<UU>(access.word_offset[word]);
    if (at + static_cast<UU>(access.bytes) > bytes.size())
        throw Error("uses byte " + std::to_string(at) + " of " + std::to_string(bytes.size()) +
                    " of shared or private memory");
    return bytes.data() + at;
}

U extended(const Access& access, U value, U old) {
    if (access.is_signed)
        value = access.bytes == 1 ? static_cast<U>(static_cast<int8_t>(value))
                                  : static_cast<U>(static_cast<int16_t>(value));
    if (access.to_low_half) return (old & 0xffff0000) | (value & 0xffff);
    if (access.to_high_half) return (old & 0xffff) | value << 16;
    return value;
}

}  // namespace

// A part of an access takes place.
void Machine::perform(const Event& event) {
    Access& access = *event.access;
    Wave& wave = *event.wave;
    Block& block = *wave.block;
    if (access.kind == Access::Kind::kWriteBack) {
        memory_.write_back(block.die, access.scope);
    } else if (access.scalar_result >= 0) {
        for (int k = 0; k < access.num_scalars; ++k) {
            access.data[k / kLanes][k % kLanes] =
                memory_.load(block.level1, block.die, access.address[0] + 4 * static_cast<UU>(k), 4,
                             Scope::kBlock);
        }
    }
    for (int i = 0; i < kLanes; ++i) {
        if ((event.lanes >> i & 1) == 0) continue;
        auto* const local = access.space[i] == Space::kShared    ? &block.shared
                            : access.space[i] == Space::kPrivate ? &wave.scratch[i]
                                                                 : nullptr;
        if (access.kind == Access::Kind::kAtomic) {
            const UU a = access.words == 2 ? wide_lane(access.data[0], access.data[1], i)
                                           : access.data[0][i];
            const UU b = access.words == 2 ? wide_lane(access.compared[0], access.compared[1], i)
                                           : access.compared[0][i];
            const int bytes = access.words * 4;
            UU old = 0;
            if (local != nullptr) {
                uint8_t* const at = gcn::place(access, i, 0, *local);
                std::memcpy(&old, at, bytes);
                const UU result = access.change(old, a, b);
                std::memcpy(at, &result, bytes);
            } else {
                old = memory_.atomic(block.level1, block.die, access.address[i], bytes,
                                     access.change, a, b, access.scope);
            }
            access.data[0][i] = static_cast<U>(old);
            if (access.words == 2) access.data[1][i] = static_cast<U>(old >> 32);
            continue;
        }
        for (int k = 0; k < access.words; ++k) {
            if ((event.words >> k & 1) == 0) continue;
            U& value = access.data[k][i];
            if (local != nullptr) {
                uint8_t* const at = gcn::place(access, i, k, *local);
                U loaded = 0;
                if (access.kind == Access::Kind::kStore)
                    std::memcpy(at, &value, access.bytes);
                else {
                    std::memcpy(&loaded, at, access.bytes);
                    value = extended(access, loaded, value);
                }
                continue;
            }
            const UU at = access.address[i] + static_cast<UU>(access.word_offset[k]);
            if (access.kind == Access::Kind::kStore)
                memory_.store(block.level1, block.die, at, access.bytes, value, access.scope);
            else
                value = extended(
                    access, memory_.load(block.level1, block.die, at, access.bytes, access.scope),
                    value);
        }
    }
    if (!memory_.finding.empty()) throw Error(memory_.finding);
    if (--access.parts_left == 0) push({access.done, 0, Event::Kind::kDone, &wave, &access, 0, 0});
}

void add_memory_opcodes(std::map<std::string, Opcode, std::less<>>& all) {
    const auto add = [&](const std::string& name, Handler run) {
        all[name] = {run, Unit::kMemory};
    };
    const auto add_family = [&]<Family FAMILY>(const std::string& name) {
        add(name + "_load_dword", load<FAMILY, 1>);
        add(name + "_load_dwordx2", load<FAMILY, 2>);
        add(name + "_load_dwordx3", load<FAMILY, 3>);
        add(name + "_load_dwordx4", load<FAMILY, 4>);
        add(name + "_load_ubyte", load<FAMILY, 1, 1>);
        add(name + "_load_sbyte", load<FAMILY, 1, 1, true>);
        add(name + "_load_ushort", load<FAMILY, 1, 2>);
        add(name + "_load_sshort", load<FAMILY, 1, 2, true>);
        add(name + "_load_short_d16", load<FAMILY, 1, 2, false, 1>);
        add(name + "_load_short_d16_hi", load<FAMILY, 1, 2, false, 2>);
        add(name + "_store_dword", store<FAMILY, 1>);
        add(name + "_store_dwordx2", store<FAMILY, 2>);
        add(name + "_store_dwordx3", store<FAMILY, 3>);
        add(name + "_store_dwordx4", store<FAMILY, 4>);
        add(name + "_store_byte", store<FAMILY, 1, 1>);
        add(name + "_store_byte_d16_hi", store<FAMILY, 1, 1, 2>);
        add(name + "_store_short", store<FAMILY, 1, 2>);
        add(name + "_store_short_d16_hi", store<FAMILY, 1, 2, 2>);
    };
    add_family.template operator()<Family::kFlat>("flat");
    add_family.template operator()<Family::kGlobal>("global");
    add_family.template operator()<Family::kScratch>("scratch");
    add("flat_atomic_add", atomic<Family::kFlat, add_words>);
    add("global_atomic_add", atomic<Family::kGlobal, add_words>);
    add("global_atomic_or", atomic<Family::kGlobal, or_words>);
    add("global_atomic_umax", atomic<Family::kGlobal, max_words>);
    add("global_atomic_swap", atomic<Family::kGlobal, swap_words>);
    add("global_atomic_cmpswap", atomic<Family::kGlobal, swap_if_equal>);
    add("global_atomic_add_x2", atomic<Family::kGlobal, add_words, 2>);
    add("ds_read_b32", load<Family::kShared, 1>);
    add("ds_read_b64", load<Family::kShared, 2>);
    add("ds_read_b96", load<Family::kShared, 3>);
    add("ds_read_b128", load<Family::kShared, 4>);
    add("ds_read_u8", load<Family::kShared, 1, 1>);
    add("ds_read_i8", load<Family::kShared, 1, 1, true>);
    add("ds_read_u16", load<Family::kShared, 1, 2>);
    add("ds_write_b8", store<Family::kShared, 1, 1>);
    add("ds_write_b16", store<Family::kShared, 1, 2>);
    add("ds_write_b32", store<Family::kShared, 1>);
    add("ds_write_b64", store<Family::kShared, 2>);
    add("ds_write_b96", store<Family::kShared, 3>);
    add("ds_write_b128", store<Family::kShared, 4>);
    add("ds_read2_b32", two<1, 1, false>);
    add("ds_read2_b64", two<2, 1, false>);
    add("ds_read2st64_b32", two<1, 64, false>);
    add("ds_read2st64_b64", two<2, 64, false>);
    add("ds_write2_b32", two<1, 1, true>);
    add("ds_write2_b64", two<2, 1, true>);
    add("ds_write2st64_b32", two<1, 64, true>);
    add("ds_write2st64_b64", two<2, 64, true>);
    add("ds_or_b32", atomic<Family::kShared, or_words>);
    add("ds_and_b32", atomic<Family::kShared, and_words>);
    add("ds_add_u32", atomic<Family::kShared, add_words>);
    add("ds_add_rtn_u32", atomic<Family::kShared, add_words, 1, true>);
    add("ds_or_rtn_b32", atomic<Family::kShared, or_words, 1, true>);
    add("ds_bpermute_b32", permute);
    add("s_load_dword", load_scalars<1>);
    add("s_load_dwordx2", load_scalars<2>);
    add("s_load_dwordx4", load_scalars<4>);
    add("s_load_dwordx8", load_scalars<8>);
    add("s_load_dwordx16", load_scalars<16>);
    add("buffer_wbl2", [](Wave& w, In in) {
        auto access = begin(w, in, Access::Kind::kWriteBack);
        access->mask = 0;
        w.machine->issue(std::move(access), true, false);
    });
    add("buffer_inv", [](Wave& w, In in) {
        w.machine->memory().invalidate(w.block->level1, w.block->die, scope_of(in));
    });
}

}  // namespace gcn
