#include "ngrams.h"

#include <algorithm>

namespace kccl::engine {

uint32_t Ngrams::propose(const int32_t* ids, uint32_t num_ids, uint32_t most,
                         int32_t* drafts) const {
    uint32_t num = 0;
    if (table_.words == 0) return 0;
    for (; num < std::min(most, table_.most); ++num) {
        const auto last = [&](uint32_t i) {
            return i < num ? drafts[num - 1 - i] : ids[num_ids - 1 - (i - num)];
        };
        const int32_t id = follow(num_ids + num, last);
        if (id < 0) break;
        drafts[num] = id;
    }
    return num;
}

}  // namespace kccl::engine
