// What kernels tell and ask about their calls (include/kccl/told.cuh).
#include "machine.h"

namespace kccl::sim {

uint64_t Memory::window_room(uint64_t address) const {
    for (const Window& window : windows_) {
        const uint64_t offset = address - window.address;
        if (offset < window.num_bytes) return window.num_bytes - offset;
    }
    return 0;
}

uint64_t window_room(const void* address) {
    return running->memory.window_room(reinterpret_cast<uint64_t>(address));
}

}  // namespace kccl::sim
