// query_mma.cuh on AMD GPUs, where a chunk has too few positions for it.
#pragma once

namespace kccl::decode {

struct QueryMma {
    static constexpr bool kIsThere = false;
};

}  // namespace kccl::decode
