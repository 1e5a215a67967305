// Which instruction set runs here, and how weights are packed for all of them.
#include "compute.h"

#include <string.h>

#include <algorithm>

extern "C" const char* kccl_host_instruction_set(void);

namespace kccl::engine {

extern const Compute kComputeBaseline;
#if defined(__x86_64__)
extern const Compute kComputeV3;
extern const Compute kComputeV4;
#endif

const Compute& compute() {
#if defined(__x86_64__)
    static const Compute& best = strcmp(kccl_host_instruction_set(), "x86-64-v4") == 0 ? kComputeV4
                                 : strcmp(kccl_host_instruction_set(), "x86-64-v3") == 0
                                     ? kComputeV3
                                     : kComputeBaseline;
    return best;
#else
    return kComputeBaseline;
#endif
}

}  // namespace kccl::engine

extern "C" {

const char* kccl_engine_instruction_set(void) { return kccl::engine::compute().name; }

uint64_t kccl_engine_panel_elements(uint32_t num_columns) {
    return kccl::engine::panel_elements(num_columns);
}

void kccl_engine_pack(uint16_t* panels, const uint16_t* rows, uint32_t num_rows,
                      uint32_t num_columns, uint64_t stride, uint32_t panel_step) {
    using kccl::engine::kRows;
    const uint64_t elements = kccl::engine::panel_elements(num_columns);
    for (uint32_t first = 0; first < num_rows; first += kRows) {
        uint16_t* panel = panels + uint64_t{first / kRows} * panel_step * elements;
        const uint32_t num = std::min(num_rows - first, uint32_t{kRows});
        for (uint32_t column = 0; column < num_columns; ++column) {
            uint16_t* to = panel + uint64_t{column / 2} * 2 * kRows + column % 2;
            const uint16_t* from = rows + uint64_t{first} * stride + column;
            for (uint32_t row = 0; row < num; ++row) to[2 * row] = from[row * stride];
        }
    }
}

}  // extern "C"
