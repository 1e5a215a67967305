// Gives a block's variables in block-shared memory their addresses, and checks that the block does
// not use too much of it.
#include <string.h>

#include "machine.h"

namespace kccl::sim {
namespace {

// Bytes before and behind each variable that no kernel may access, so that overruns are found.
constexpr uint64_t kSharedGuard = 256;

uint8_t* aligned(uint8_t* address, uint64_t alignment) {
    const auto number = reinterpret_cast<uint64_t>(address);
    return reinterpret_cast<uint8_t*>((number + alignment - 1) / alignment * alignment);
}

}  // namespace

void* Machine::shared(const void* declaration, uint64_t num_bytes, uint64_t alignment) {
    Block& block = *current_->block;
    for (const SharedVariable& each : block.shared) {
        if (each.declaration == declaration) return reinterpret_cast<void*>(each.region.begin);
    }
    auto bytes = std::make_unique<uint8_t[]>(kSharedGuard + num_bytes + alignment + kSharedGuard);
    const auto begin = reinterpret_cast<uint64_t>(aligned(bytes.get() + kSharedGuard, alignment));
    // A GPU does not initialise shared memory, so no kernel may rely on zeros. 0xff bytes are NaN
    // in every type of floats, so that results that are computed from them are visibly wrong.
    memset(reinterpret_cast<void*>(begin), 0xff, num_bytes);
    memory.forget(begin, num_bytes);
    const Region region = {begin,
                           num_bytes,
                           declaration == nullptr ? kKcclSimEdgeDynamic : kKcclSimEdgeShared,
                           block.grid->rank,
                           static_cast<int32_t>(block.index),
                           0};
    block.shared.push_back({declaration, region, std::move(bytes)});
    check_shared(block);
    return reinterpret_cast<void*>(begin);
}

// Reports a block whose variables so far have more bytes than a GPU allows: static ones alone, or
// together with its dynamic shared memory.
void Machine::check_shared(const Block& block) {
    uint64_t variables = 0;
    for (const SharedVariable& each : block.shared) {
        if (each.declaration != nullptr) variables += each.region.num_bytes;
    }
    const bool is_static =
        settings.most_static_shared != 0 && variables > settings.most_static_shared;
    const uint64_t dynamic = is_static ? 0 : block.grid->launch.shared_bytes;
    const uint64_t most = is_static ? settings.most_static_shared : settings.most_shared;
    if (variables == 0 || most == 0 || variables + dynamic <= most) return;
    report_here(kKcclSimTooMuchShared);
    findings.back().num_bytes = variables;
    findings.back().edge_bytes = most;
    findings.back().address = dynamic;
    leave_if_found();
}

}  // namespace kccl::sim
