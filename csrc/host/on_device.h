// Makes a queue's device current in a thread while calls of the driver need it.
#pragma once

#include "cuda_driver.h"
#include "host.h"

namespace kccl::host {

// Makes the queue's device current in this thread. With HIP, which has no stack of contexts, also
// stores in *before the number of the device that was current. Returns the driver's code.
inline int make_current(const KcclGpuQueue& queue, int* before) {
    if (queue.current_device != 0) {
        const auto current = reinterpret_cast<driver::CurrentDevice>(queue.current_device);
        if (const int error = current(before); error != 0) return error;
    }
    return reinterpret_cast<driver::PushContext>(queue.push_context)(queue.context);
}

// Makes the device current again that was so before make_current().
inline void make_previous_current(const KcclGpuQueue& queue, int before) {
    if (queue.pop_context != 0) {
        uint64_t context;
        reinterpret_cast<driver::PopContext>(queue.pop_context)(&context);
    } else {
        const auto number = static_cast<uint64_t>(before);
        reinterpret_cast<driver::PushContext>(queue.push_context)(number);
    }
}

}  // namespace kccl::host
