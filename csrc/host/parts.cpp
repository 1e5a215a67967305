// Makes calls in which each pair of ranks has a part of its own length, by messages: parts.inc.
#include <stddef.h>

#include "../include/kccl/payload.cuh"
#include "../include/kccl/wait.cuh"
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
    for (uint64_t i = 0; i < parts.num_messages; ++i) {
        KcclMessage& each = parts.messages[i];
        each.address = (each.receives != 0 ? call->output : input) + parts.offsets[i];
    }
    const KcclMessages all = {reinterpret_cast<uint64_t>(parts.messages), parts.num_messages};
    parts.exchange.call.input = reinterpret_cast<uint64_t>(&all);
    parts.exchange.kernel(&parts.exchange.call);
}

}  // namespace
}  // namespace kccl::host

extern "C" {

int32_t kccl_host_tag_of_parts(int32_t channel) { return kccl::host::tag_of_parts(channel); }

void kccl_host_bind_parts(KcclHostParts* parts) {
    parts->op.kernel = kccl::host::run_parts;
    parts->exchange.call = parts->op.call;
    kccl_host_bind_messages(&parts->exchange);
}

}  // extern "C"
