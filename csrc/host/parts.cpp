// Makes calls in which each pair of ranks has a part of its own length, by messages: parts.inc.
#include <stddef.h>

#include "../include/kccl/payload.cuh"
#include "../include/kccl/wait.cuh"
#include "routes.h"
#include "tags.h"

extern "C" {
#include "parts.inc"
}

namespace kccl::host {
namespace {

void run_parts(const KcclCall* call) {
    auto& parts = *const_cast<KcclHostParts*>(reinterpret_cast<const KcclHostParts*>(
        reinterpret_cast<const uint8_t*>(call) - offsetof(KcclHostParts, op.call)));
    // After a communicator is closed, its status is not ok, and the temporary memory is gone.
    if (status_of(call->comm) != kKcclOk) return;
    uint64_t input = call->input;
    if (call->output == input) {
        // A part that arrives would overwrite one that has not been sent.
        __builtin_memcpy(reinterpret_cast<void*>(parts.temporary), input_of<uint8_t>(*call),
                         parts.num_input);
        input = parts.temporary;
    }
    __builtin_memcpy(output_of<uint8_t>(*call) + parts.own_to,
                     reinterpret_cast<const uint8_t*>(input) + parts.own_from, parts.num_own);
    make_messages(state_of(call->comm)->idle_context, parts.messages, parts.offsets,
                  parts.num_messages, input, call->output);
}

}  // namespace
}  // namespace kccl::host

extern "C" {

int32_t kccl_host_tag_of_parts(int32_t channel, int32_t kernel) {
    return kccl::host::tag_of_parts(channel, kernel);
}

void kccl_host_bind_parts(KcclHostParts* parts) { parts->op.kernel = kccl::host::run_parts; }

}  // extern "C"
