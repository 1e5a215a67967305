// Decides whether a thread of a kernel may access an address, and finds the memory that a wrong
// access was probably meant for.
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "machine.h"

namespace kccl::sim {
namespace {

// No array has more bytes than this. So an address that lies further behind a pointer does not
// belong to the pointer's array.
constexpr uint64_t kMostBytes = uint64_t{1} << 34;
// An access that lies further than this from a region of memory probably was not meant for it.
constexpr uint64_t kNearBytes = uint64_t{1} << 24;
// The distance of an access before a region's beginning is multiplied by this before it is compared
// with others, because programs run beyond an end more often than before a beginning.
constexpr uint64_t kBeforeIsRarer = 16;

uint64_t page_of(uint64_t address) {
    static const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return address / page_bytes * page_bytes;
}

bool is_mapped(uint64_t address) {
    unsigned char unused = 0;
    return mincore(reinterpret_cast<void*>(page_of(address)), 1, &unused) == 0;
}

// Tells whether all pages of a region are mapped.
bool are_mapped(const Region& region) {
    const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    for (uint64_t at = page_of(region.begin); at < region.end(); at += page_bytes) {
        if (!is_mapped(at)) return false;
    }
    return true;
}

// Tells whether an address lies in a shared library of this process, so that it may be that of a
// global variable or constant.
bool is_global(uint64_t address) {
    Dl_info unused;
    return dladdr(reinterpret_cast<void*>(address), &unused) != 0;
}

}  // namespace

// Returns the region of memory that contains these bytes and that the running thread may access, or
// null if the machine knows no such region.
const Region* Machine::own_region(uint64_t address, uint64_t num_bytes) const {
    const Block& block = *current_->block;
    for (const SharedVariable& each : block.shared) {
        if (each.region.holds(address, num_bytes)) return &each.region;
    }
    // A kernel may also access the arrays of other running launches of its rank, because they are
    // on the same device.
    for (const std::shared_ptr<Grid>& grid : running_) {
        if (grid->rank != block.grid->rank) continue;
        for (const Region& each : grid->arrays) {
            if (each.holds(address, num_bytes)) return &each;
        }
    }
    return edges.find(address, num_bytes);
}

// Calls visit(region) for all memory that the machine knows: first the running thread's own, last
// the memory that is gone.
template <class Visit>
void Machine::visit_regions(Visit visit) const {
    const Block& mine = *current_->block;
    for (const SharedVariable& each : mine.shared) visit(each.region);
    for (const Region& each : mine.grid->arrays) visit(each);
    for (const Region& each : edges.regions()) visit(each);
    for (const std::shared_ptr<Grid>& grid : running_) {
        if (grid.get() != mine.grid) {
            for (const Region& each : grid->arrays) visit(each);
        }
        for (const std::unique_ptr<Block>& block : grid->blocks) {
            if (block.get() == &mine) continue;
            for (const SharedVariable& each : block->shared) visit(each.region);
        }
    }
    for (const Region& each : edges.gone()) visit(each);
}

bool Machine::may_access_slowly(uint64_t address, uint64_t num_bytes, KcclSimEventKind kind) {
    if (num_bytes == 0 || settings.knows_memory == 0) return true;
    const Fiber& me = *current_;
    const Region* const own = own_region(address, num_bytes);
    if (own != nullptr) {
        edges.allow(me.owner, address, own->begin, own->end());
        return true;
    }
    const uint64_t stack = me.self.stack;
    if (address >= stack && address - stack < Stacks::kBytes) return true;
    if (!stacks_.holds(address) && is_explained(address, num_bytes) && is_mapped(address) &&
        is_mapped(address + num_bytes - 1)) {
        return true;
    }
    report_edge(address, num_bytes, kind);
    return false;
}

// Tells whether an access outside of all memory that the machine knows may be right nevertheless.
// It is right if it goes to a global variable, or to memory behind a pointer that the program has
// stored in an argument, an array, a window or shared memory. The pointer must not point into
// memory that the machine knows, and none of that may lie between pointer and access.
bool Machine::is_explained(uint64_t address, uint64_t num_bytes) {
    Grid& grid = *current_->block->grid;
    uint64_t least = 0;
    uint64_t most = UINT64_MAX;
    bool is_known = false;
    bool is_freed = false;
    visit_regions([&](const Region& each) {
        if (each.touches(address, 1)) {
            (each.kind == kKcclSimEdgeFreed ? is_freed : is_known) = true;
        }
        if (each.end() <= address) least = std::max(least, each.end() + 1);
        if (each.begin > address) most = std::min(most, each.begin);
    });
    if (is_known || address + num_bytes > most || address + num_bytes < address) return false;
    if (address > kMostBytes) least = std::max(least, address - kMostBytes);
    const auto explains = [&](uint64_t word) {
        if (word < least || word > address) return false;
        const Region part = edges.allow_line(grid.owner, address, num_bytes, word, most);
        Region& known = grid.foreign_parts[part.begin];
        if (known.num_bytes < part.num_bytes) known = part;
        return true;
    };
    const auto search = [&](const Region& region) {
        const uint64_t end = region.end() / 8 * 8;
        for (uint64_t at = (region.begin + 7) / 8 * 8; at < end; at += 8) {
            const uint64_t word = *reinterpret_cast<const uint64_t*>(at);
            if (!explains(word)) continue;
            grid.foreign_pointers.push_back(word);
            return true;
        }
        return false;
    };
    if (std::any_of(grid.foreign_pointers.begin(), grid.foreign_pointers.end(), explains)) {
        return true;
    }
    for (const Region& each : grid.arrays) {
        // Arrays in windows are searched with the windows, at the end.
        if (edges.find(each.begin, 1) == nullptr && search(each)) return true;
    }
    for (const auto& [begin, part] : grid.foreign_parts) {
        // The program may have unmapped this part since the kernel accessed it.
        if (are_mapped(part) && search(part)) return true;
    }
    // If the memory has been freed, a pointer to it that a window has kept since an earlier launch
    // does not make the access right. So windows are not searched.
    if (is_freed) return false;
    if (is_global(address)) {
        edges.allow_line(grid.owner, address, num_bytes, least, most);
        return true;
    }
    for (const SharedVariable& each : current_->block->shared) {
        if (search(each.region)) return true;
    }
    return std::any_of(edges.regions().begin(), edges.regions().end(),
                       [&search](const Region& each) { return each.has_pointers && search(each); });
}

void Machine::report_edge(uint64_t address, uint64_t num_bytes, KcclSimEventKind kind) {
    const Fiber& mine = *current_;
    Region found;
    uint64_t least = UINT64_MAX;
    const bool begins_in_own = own_region(address, 1) != nullptr;
    visit_regions([&](const Region& each) {
        uint64_t distance = 0;
        if (!each.touches(address, 1)) {
            distance = each.end() <= address ? address - each.end() + 1
                                             : (each.begin - address) * kBeforeIsRarer;
            if (distance > kNearBytes || each.kind == kKcclSimEdgeArguments) return;
        }
        if (distance >= least) return;
        least = distance;
        found = each;
    });
    bool is_foreign = least == 0 && !begins_in_own;
    if (least != 0 && stacks_.holds(address)) {
        found = {address, num_bytes, kKcclSimEdgeStack, mine.block->grid->rank, -1, 0};
        is_foreign = true;
    }
    const Deed deed = {mine.knowledge.now(), mine.knowledge.call, mine.site, steps, kind, true};
    report(kKcclSimOutOfBounds, deed, address, {});
    KcclSimFinding& finding = findings.back();
    finding.num_bytes = num_bytes;
    finding.edge = found.kind;
    finding.edge_address = found.begin;
    finding.edge_bytes = found.num_bytes;
    finding.edge_name = found.name;
    finding.edge_rank = found.rank;
    finding.edge_block = found.block;
    finding.is_foreign = is_foreign ? 1 : 0;
}

}  // namespace kccl::sim
