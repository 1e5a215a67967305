// Functions that read a Task, the description of a request that a kernel gets (abi.inc).
#pragma once

#include "abi.cuh"

namespace kccl::decode {

// Tells whether the token step of `position` computes logits. Only then are the head's weights
// read.
KCCL_DECODE bool wants_head(const Task& task, uint32_t position) {
    if (task.logits[0] != 0 || task.only_reads != 0) return true;
    return task.max_tokens != 0 && position + 1 >= task.num_ids;
}

// Tells whether the request has begun in another kernel, which has left it to this one
// (leaving.cuh).
KCCL_DECODE bool goes_on(const Task& task) {
    return task.most_drafts != 0 && task.start >= task.num_ids;
}

// Returns a token as the 16 bytes for which the host polls (KcclDecodeToken). Each half has the
// request's number, so that the host can tell that both halves have come.
KCCL_DECODE mem::Packet token_packet(const Task& task, uint32_t id_and_end, float logprob) {
    const uint64_t number = uint64_t{task.number} << 32;
    return {{id_and_end | number, platform::bit_cast<uint32_t>(logprob) | number}};
}

}  // namespace kccl::decode
