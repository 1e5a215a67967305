// The regions of memory that kernels may access, as far as the machine knows them: see "Where
// memory ends" in MODEL.md.
#pragma once

#include <stdint.h>

#include <array>
#include <deque>
#include <vector>

#include "types.h"

namespace kccl::sim {

// A piece of memory, and what it is.
struct Region {
    uint64_t begin = 0;  // its address
    uint64_t num_bytes = 0;
    KcclSimEdge kind = kKcclSimEdgeNone;
    int32_t rank = -1;   // the rank to which it belongs
    int32_t block = -1;  // of shared memory: its block
    uint64_t name = 0;   // KcclSimArray.name
    // Whether a program may have stored pointers here that its kernels use.
    bool has_pointers = true;

    uint64_t end() const { return begin + num_bytes; }
    bool holds(uint64_t address, uint64_t count) const {
        return address >= begin && address - begin <= num_bytes &&
               count <= num_bytes - (address - begin);
    }
    // Tells whether the region and the `count` bytes at `address` have a byte in common.
    bool touches(uint64_t address, uint64_t count) const {
        return address >= begin ? address - begin < num_bytes : begin - address < count;
    }
};

// Keeps the regions of all ranks that outlive a launch, regions that have been closed or freed, and
// a cache of what threads may access. The regions of a launch's arrays are in Grid, those of a
// block's shared memory in Block.
class Edges {
  public:
    // In the cache an owner is a number that stands for the threads that may access some memory. A
    // grid's owner is a multiple of kOwnersPerGrid; its blocks' owners are the numbers after that.
    // Owner 0 stands for all threads.
    static constexpr uint64_t kOwnersPerGrid = uint64_t{1} << 20;
    static uint64_t owner_of_grid(uint64_t owner) { return owner & ~(kOwnersPerGrid - 1); }
    uint64_t new_owner() { return next_owner_ += kOwnersPerGrid; }

    // Tells whether the cache says that this block's threads may access these bytes; if not, they
    // may be allowed nevertheless. owner: that of the block.
    bool allows(uint64_t owner, uint64_t address, uint64_t num_bytes) const {
        const Line& line = lines_[address / kLineBytes % kLines];
        return address >= line.begin && address < line.end && num_bytes <= line.end - address &&
               (line.owner == owner || line.owner == 0 || line.owner == owner_of_grid(owner));
    }
    // Stores in the cache that the owner may access the bytes [begin, end), which contain
    // `address`.
    void allow(uint64_t owner, uint64_t address, uint64_t begin, uint64_t end) {
        lines_[address / kLineBytes % kLines] = {begin, end, owner};
    }
    // Stores in the cache that the owner may access the line of kLineBytes bytes around an access,
    // extended to the end of the access, but nothing below `least` or from `most` on. Returns the
    // part that is allowed.
    Region allow_line(uint64_t owner, uint64_t address, uint64_t num_bytes, uint64_t least,
                      uint64_t most);

    // Adds a region; removes the one that begins at this address, which then counts as closed.
    void add(const Region& region);
    void remove(uint64_t begin);
    // Remembers that an array has been freed, unless it lies in a region that is still there.
    void free(const Region& region);

    const std::vector<Region>& regions() const { return regions_; }
    // Returns the regions that have been closed or freed last, the latest first.
    const std::deque<Region>& gone() const { return gone_; }
    // Returns the region that contains all of the bytes; null if there is none.
    const Region* find(uint64_t address, uint64_t num_bytes) const;

  private:
    static constexpr uint64_t kLineBytes = 512;
    static constexpr uint64_t kLines = 1024;
    static constexpr size_t kMostGone = 256;

    // An entry of the cache, whose index is that of an address's line modulo kLines.
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
