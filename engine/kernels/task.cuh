// What a kernel reads from its task (abi.inc).
#pragma once

#include "abi.cuh"

namespace kccl::decode {

// Whether a round's logits are wanted: the head's weights are read then only.
KCCL_DEVICE bool wants_head(const Task& task, uint32_t position) {
    if (task.logits[0] != 0 || task.only_reads != 0) return true;
    return task.max_tokens != 0 && position + 1 >= task.num_ids;
}

}  // namespace kccl::decode
