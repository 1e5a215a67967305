#include "edges.h"

#include <algorithm>

namespace kccl::sim {

Region Edges::allow_line(uint64_t owner, uint64_t address, uint64_t num_bytes, uint64_t least,
                         uint64_t most) {
    const uint64_t first = address / kLineBytes * kLineBytes;
    const uint64_t begin = std::max(first, least);
    const uint64_t end = std::min(std::max(first + kLineBytes, address + num_bytes), most);
    allow(owner, address, begin, end);
    return {.begin = begin, .num_bytes = end - begin};
}

void Edges::add(const Region& region) {
    // The system may give out an address again: memory that was closed or freed no longer counts as
    // gone when it is added again.
    std::erase_if(gone_, [&region](const Region& each) {
        return each.touches(region.begin, region.num_bytes);
    });
    const auto at =
        std::upper_bound(regions_.begin(), regions_.end(), region.begin,
                         [](uint64_t begin, const Region& each) { return begin < each.begin; });
    regions_.insert(at, region);
    lines_.fill({});
}

void Edges::remove(uint64_t begin) {
    const auto at = std::find_if(regions_.begin(), regions_.end(),
                                 [begin](const Region& each) { return each.begin == begin; });
    if (at == regions_.end()) return;
    Region closed = *at;
    closed.kind = kKcclSimEdgeClosed;
    regions_.erase(at);
    remember_gone(closed);
    lines_.fill({});
}

void Edges::free(const Region& region) {
    if (find(region.begin, 1) == nullptr) remember_gone(region);
}

void Edges::remember_gone(const Region& region) {
    std::erase_if(gone_, [&region](const Region& each) { return each.begin == region.begin; });
    gone_.push_front(region);
    if (gone_.size() > kMostGone) gone_.pop_back();
}

const Region* Edges::find(uint64_t address, uint64_t num_bytes) const {
    auto at =
        std::upper_bound(regions_.begin(), regions_.end(), address,
                         [](uint64_t wanted, const Region& each) { return wanted < each.begin; });
    if (at == regions_.begin()) return nullptr;
    --at;
    return at->holds(address, num_bytes) ? &*at : nullptr;
}

}  // namespace kccl::sim
