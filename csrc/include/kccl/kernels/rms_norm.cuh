// rms_norm: adds the residual to rows, and normalises them. No peer takes part.
//
// The block takes every so many-th row. norm.cuh says what a result is, and in which order its sum
// is made.
#pragma once

#include "../norm.cuh"

namespace kccl {

// Called by all threads of the coop. The coop takes rows `first`, `first + step` and so on. `out`
// may be `in`, if it has its type. Otherwise no two arrays overlap.
template <class T, class Coop>
KCCL_DEVICE void rms_norm(Coop coop, const NormedRows<T>& rows, uint64_t first, uint64_t step) {
    [[maybe_unused]] const platform::DefaultFloats floats{};
    if constexpr (platform::kCpu) {
        for (uint64_t row = first; rows.has(row); row += step) row_on_cpu(rows, row);
    } else {
        KCCL_BLOCK_SHARED(GroupSums, sums);
        const uint32_t num = num_payloads<T>(rows.width);
        uint32_t turn = 0;
        for (uint64_t row = first; rows.has(row); row += step) {
            const T* const in = rows.in + row * rows.width;
            T* const residual =
                rows.residual != nullptr ? rows.residual + row * rows.width : nullptr;
            float total = 0;
            for (uint32_t piece = 0; piece < num; piece += kPiecePayloads) {
                float* const groups = sums.of[turn++ % 2];
                const uint32_t rest = num - piece;
                const uint32_t payloads = rest < kPiecePayloads ? rest : kPiecePayloads;
                for (uint32_t at = 0; at < payloads; at += coop.size()) {
                    const uint32_t i = at + coop.index();
                    const bool is_mine = i < payloads;
                    uint64_t hidden[1] = {0};
                    if (is_mine) load_payloads(hidden, in, piece + i, rows.width);
                    if (is_mine && residual != nullptr) {
                        uint64_t more[1];
                        load_payloads(more, residual, piece + i, rows.width);
                        hidden[0] = add_payloads<T>(hidden[0], more[0]);
                        store_payloads(residual, piece + i, rows.width, hidden);
                    }
                    add_to_group<T>(groups, i, is_mine, hidden[0]);
                }
                coop.sync();
                total += sum_of_groups(groups, payloads);
            }
            store_normalised(coop, rows, residual != nullptr ? residual : in, row, total);
        }
    }
}

namespace kernels {

template <class T>
KCCL_KERNEL void rms_norm(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::rms_norm(block(), NormedRows<T>(call), platform::block_in_grid(),
                   platform::blocks_per_grid());
}

}  // namespace kernels
}  // namespace kccl
