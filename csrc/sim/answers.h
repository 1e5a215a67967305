// Functions that kernels call through the table in engine.cpp (KcclSimEngine), but that other files
// implement. targets/sim_device.h says what they do.
#pragma once

#include <stdint.h>

#include "../include/kccl/targets/sim_device.h"

namespace kccl::sim {

// In faults.cpp.
void* move_bytes(void* to, const void* from, uint64_t num_bytes);
void* fill_bytes(void* to, int value, uint64_t num_bytes);
void stop_overrun(const void* site);
void stop_assertion(const char* text, const void* site);

// In coops.cpp.
void begin_together(const KcclSimCoopCall* call);
void refuse_argument(const KcclSimRefusal* refusal);

// In calls.cpp.
uint64_t window_room(const void* address);
void call_begins(const KcclSimCall* call);
void channel_opens(const KcclSimOpening* opening);
void channel_closes(const KcclSimOpening* opening);

}  // namespace kccl::sim
