// What memory holds as each compute unit sees it: L1 caches, an L2 cache for each die, and memory
// behind them. Nothing here takes time; the machine says when an access takes place.
//
// The model is LLVM's for gfx942 (User Guide for AMDGPU Backend, Memory Model GFX942), and nothing
// that the hardware may do beyond it to keep caches coherent:
//
//   - the L2 caches of dies are not coherent. A store without a scope (sc1) stays in its die's L2
//     until a write-back; a load without one may read what a cache holds, however old;
//   - agent scope (sc1) passes the caches for memory of the own GPU, system scope (sc0 sc1) for all
//     memory;
//   - buffer_wbl2 writes a die's dirty bytes back, buffer_inv forgets what is clean, of memory that
//     its scope covers. buffer_inv without scope, and with it, empties the L1;
//   - atomics are performed in memory: the compiler gives those of agent scope no sc1.
//
// Caches never evict. So what is stale stays so, and what is dirty too.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace gcn {

constexpr uint64_t kLineBytes = 128;
constexpr int kDies = 8;

enum class Scope : uint8_t { kBlock, kAgent, kSystem };

// The rank of memory that all ranks have a copy of, and nobody writes.
constexpr int kEveryRank = -1;

// Memory of one rank that every rank may use, or constants.
struct Region {
    uint64_t begin, end;
    int rank;
    // Who stored each 4 bytes last, past or through its caches: 1 + rank, with kSystem in bit 7.
    std::vector<uint8_t> writers;
};

struct Line {
    uint8_t data[kLineBytes];
    uint64_t has[2], dirty[2];  // a bit for each byte
};

struct Cache {
    std::unordered_map<uint64_t, Line> lines;  // by address / kLineBytes
};

class Memory {
  public:
    explicit Memory(int world_size) : dies_(world_size * kDies) {}

    void add_region(uint64_t begin, uint64_t bytes, int rank);
    void drop_region(uint64_t begin);
    int add_level1();
    // Whose memory it is for a rank: constants are its own. Throws Error for an address that is
    // nobody's.
    int owner(int rank, uint64_t address, uint64_t bytes = 1) {
        const int owner = region(address, bytes).rank;
        return owner == kEveryRank ? rank : owner;
    }

    // Whether an access passes the caches.
    bool passes(Scope scope, int rank, uint64_t address) {
        return scope == Scope::kSystem || (scope == Scope::kAgent && owner(rank, address) == rank);
    }
    bool is_in_level1(int level1, uint64_t address) const;
    bool is_in_level2(int die, uint64_t address) const;

    // Accesses of 1, 2 or 4 bytes. Those with a scope are aligned. `die` counts those of all ranks.
    uint32_t load(int level1, int die, uint64_t address, int bytes, Scope scope);
    void store(int level1, int die, uint64_t address, int bytes, uint32_t value, Scope scope);
    // The old value. Word k of 64 bits is added in the same step if `bytes` is 8.
    uint64_t atomic(int level1, int die, uint64_t address, int bytes,
                    uint64_t (*change)(uint64_t old, uint64_t a, uint64_t b), uint64_t a,
                    uint64_t b, Scope scope);

    void write_back(int die, Scope scope);
    void invalidate(int level1, int die, Scope scope);
    void empty_level1(int level1) { level1_[level1].lines.clear(); }
    uint64_t num_dirty(int die) const;
    // What the last load of narrow scope found wrong; empty if nothing.
    std::string finding;

  private:
    Region& region(uint64_t address, uint64_t bytes);
    Line& fetched(int die, uint64_t line);
    void note_writer(uint64_t address, int bytes, int rank, bool is_system);

    std::vector<Region> regions_;
    size_t last_region_ = 0;
    std::vector<Cache> dies_, level1_;
};

}  // namespace gcn
