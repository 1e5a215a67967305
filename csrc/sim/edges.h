// The bounds of the memory that kernels may access. MODEL.md says what is known of it.
#pragma once

#include <stdint.h>

#include <array>
#include <deque>
#include <vector>

#include "types.h"

namespace kccl::sim {

struct Region {
    uint64_t begin = 0;
    uint64_t num_bytes = 0;
    KcclSimEdge kind = kKcclSimEdgeNone;
    int32_t rank = -1;
    int32_t block = -1;  // for shared memory: its block
    uint64_t name = 0;   // KcclSimArray.name
    // A program may store pointers here, which its kernels use.
    bool has_pointers = true;

    uint64_t end() const { return begin + num_bytes; }
    bool holds(uint64_t address, uint64_t count) const {
        return address >= begin && address - begin <= num_bytes &&
               count <= num_bytes - (address - begin);
    }
    // Tells whether the two ranges have a byte in common.
    bool touches(uint64_t address, uint64_t count) const {
        return address >= begin ? address - begin < num_bytes : begin - address < count;
    }
};

// Keeps the memory of all ranks that outlives a launch, memory that has been closed or freed, and a
// cache of what threads may access. Grid keeps a grid's arrays, Block a block's shared memory.
class Edges {
  public:
    // Owners of memory are numbers. A grid's is a multiple of this, and those of its blocks follow.
    // Owner 0: everybody.
    static constexpr uint64_t kOwnersPerGrid = uint64_t{1} << 20;
    static uint64_t owner_of_grid(uint64_t owner) { return owner & ~(kOwnersPerGrid - 1); }
    uint64_t new_owner() { return next_owner_ += kOwnersPerGrid; }

    // Tells whether the cache knows that this owner may access these bytes.
    bool allows(uint64_t owner, uint64_t address, uint64_t num_bytes) const {
        const Line& line = lines_[address / kLineBytes % kLines];
        return address >= line.begin && address < line.end && num_bytes <= line.end - address &&
               (line.owner == owner || line.owner == 0 || line.owner == owner_of_grid(owner));
    }
    // Tells the cache that the owner may access [begin, end), which holds the address.
    void allow(uint64_t owner, uint64_t address, uint64_t begin, uint64_t end) {
        lines_[address / kLineBytes % kLines] = {begin, end, owner};
    }
    // Does what allow() does, for the part of [least, most) around these bytes, up to the ends of
    // their line. Returns that part.
    Region allow_line(uint64_t owner, uint64_t address, uint64_t num_bytes, uint64_t least,
                      uint64_t most);

    void add(const Region& region);
    void remove(uint64_t begin);
    // Called when an array has been freed.
    void free(const Region& region);

    const std::vector<Region>& regions() const { return regions_; }
    // Returns closed and freed memory, the latest first.
    const std::deque<Region>& gone() const { return gone_; }
    // Returns the region that holds the bytes; null if there is none.
    const Region* find(uint64_t address, uint64_t num_bytes) const;

  private:
    static constexpr uint64_t kLineBytes = 512;
    static constexpr uint64_t kLines = 1024;
    static constexpr size_t kMostGone = 256;

    struct Line {
        uint64_t begin = 0;
        uint64_t end = 0;
        uint64_t owner = 0;
    };

    void remember_gone(const Region& region);

    std::array<Line, kLines> lines_ = {};
    std::vector<Region> regions_;  // sorted by address; they do not overlap
    std::deque<Region> gone_;
    uint64_t next_owner_ = 0;
};

}  // namespace kccl::sim
