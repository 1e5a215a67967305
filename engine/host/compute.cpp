// Chooses the functions for this CPU's instruction set. Also has those functions of the C interface
// that need only a model's sizes and its formats.
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>

#include "layout.h"

extern "C" const char* kccl_host_instruction_set(void);

namespace kccl::engine {

extern const Compute kComputeBaseline;
#if defined(__x86_64__)
extern const Compute kComputeV3;
extern const Compute kComputeV4;
extern const Compute kComputeVnni;
#endif

#define KCCL_ENGINE_FORMAT(FORMAT) \
    {FORMAT::kName, panel_bytes<FORMAT>, FORMAT::stored_bytes, FORMAT::pack, FORMAT::widen},
const FormatOf kFormats[] = {KCCL_ENGINE_FORMATS(KCCL_ENGINE_FORMAT)};
#undef KCCL_ENGINE_FORMAT

#if defined(__x86_64__)
namespace {

// Tells whether the CPU has VNNI, which multiplies and adds four pairs of bytes at once. CPUs with
// AVX-512 may lack it.
bool has_vnni() {
    uint32_t eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ecx & bit_AVX512VNNI) != 0;
}

const Compute& best_of_x86_64() {
    const char* name = kccl_host_instruction_set();
    if (strcmp(name, "x86-64-v4") == 0) return has_vnni() ? kComputeVnni : kComputeV4;
    return strcmp(name, "x86-64-v3") == 0 ? kComputeV3 : kComputeBaseline;
}

}  // namespace
#endif

const Compute& compute() {
#if defined(__x86_64__)
    static const Compute& best = best_of_x86_64();
    return best;
#else
    return kComputeBaseline;
#endif
}

}  // namespace kccl::engine

extern "C" {

void kccl_engine_matrix(const KcclEngineModel* model, uint32_t kind, uint32_t* num_panels,
                        uint32_t* num_columns) {
    const kccl::engine::Matrix matrix = kccl::engine::matrix_of(*model, kind);
    *num_panels = matrix.panels_per_lane;
    *num_columns = matrix.num_columns;
}

uint64_t kccl_engine_window_bytes(const KcclEngineModel* model, int world_size) {
    return kccl::engine::window_of(*model, world_size).bytes;
}

const char* kccl_engine_instruction_set(void) { return kccl::engine::compute().name; }

int kccl_engine_format(const char* name) {
    for (const kccl::engine::FormatOf& each : kccl::engine::kFormats) {
        if (strcmp(each.name, name) == 0) return static_cast<int>(&each - kccl::engine::kFormats);
    }
    return -1;
}

uint64_t kccl_engine_panel_bytes(uint32_t format, uint32_t num_columns) {
    return kccl::engine::kFormats[format].panel_bytes(num_columns);
}

void kccl_engine_pack(uint32_t format, uint8_t* panels, const uint8_t* rows, uint32_t num_rows,
                      uint32_t num_columns, uint32_t panel_step) {
    using kccl::engine::kRows;
    const kccl::engine::FormatOf& f = kccl::engine::kFormats[format];
    const uint64_t bytes = f.panel_bytes(num_columns), row_bytes = f.stored_bytes(num_columns);
    for (uint32_t first = 0; first < num_rows; first += kRows) {
        f.pack(panels + uint64_t{first / kRows} * panel_step * bytes, rows + first * row_bytes,
               std::min(num_rows - first, uint32_t{kRows}), num_columns);
    }
}

}  // extern "C"
