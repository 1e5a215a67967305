// rms_norm: adds the residual to rows, and normalises them. No peer takes part.
//
// The blocks of the grid take the rows in turn. norm.cuh defines the result, and the order in which
// the sum of squares is added.
#pragma once

#include "../columns.cuh"

namespace kccl {

// Normalises rows `first`, `first + step` and so on. rows.out may be rows.in if the result has type
// T. Otherwise no two arrays overlap. Called by all threads of the coop (a thread, warp or block:
// coop.cuh); on a GPU they are at least a warp.
template <class T, class Coop>
KCCL_DEVICE void rms_norm(Coop coop, const NormedRows<T>& rows, uint64_t first, uint64_t step) {
    [[maybe_unused]] const platform::DefaultFloats floats{};
    if constexpr (platform::kCpu) {
        for (uint64_t row = first; rows.has(row); row += step) row_on_cpu(rows, row);
    } else {
        KCCL_BLOCK_SHARED(GroupSums, sums);
        const uint32_t width = rows.width;
        const uint32_t num = rows.num_columns();
        const bool are_lines = rows.are_lines();
        const float share = 1.0f / static_cast<float>(width);
        const float scale =
            rows.fp8_scale != nullptr ? 1.0f / mem::load_plain(rows.fp8_scale) : 1.0f;
        uint32_t turn = 0;
        for (uint64_t row = first; rows.has(row); row += step) {
            const T* const in = rows.in + row * width;
            T* const residual = rows.residual != nullptr ? rows.residual + row * width : nullptr;
            // The column that this thread has loaded last. In a row with at most one column for
            // each thread it stays here, so that it is not loaded again.
            uint64_t hidden[kColumnPayloads] = {}, weight[kColumnPayloads] = {};
            float total = 0;
            for (uint32_t piece = 0; piece < num; piece += kPieceColumns, ++turn) {
                const uint32_t rest = num - piece;
                const uint32_t columns = rest < kPieceColumns ? rest : kPieceColumns;
                clear_groups(coop, sums.piece(turn), columns);
                for (uint32_t at = 0; at < columns; at += coop.size()) {
                    const uint32_t column = at + coop.index();
                    const bool is_mine = column < columns;
                    if (is_mine) {
                        load_column(hidden, in, piece + column, width, are_lines);
                        load_column(weight, rows.weight, piece + column, width, are_lines);
                    }
                    if (is_mine && residual != nullptr) {
                        uint64_t more[kColumnPayloads];
                        load_column(more, residual, piece + column, width, are_lines);
                        KCCL_UNROLL
                        for (uint32_t k = 0; k < kColumnPayloads; ++k) {
                            hidden[k] = add_payloads<T>(hidden[k], more[k]);
                        }
                        store_column(residual, piece + column, width, are_lines, hidden);
                    }
                    add_to_group<T>(sums.piece(turn), column, is_mine, hidden);
                }
                coop.sync();
                total += sum_of_groups(sums.lines(turn));
            }
            const float inverse = inverse_rms(total, share, rows.eps);
            for (uint32_t column = coop.index(); column < num; column += coop.size()) {
                if (num > coop.size()) {
                    load_column(hidden, residual != nullptr ? residual : in, column, width,
                                are_lines);
                    load_column(weight, rows.weight, column, width, are_lines);
                }
                store_normalised(rows, row, column, are_lines, hidden, weight, inverse, scale);
                store_canonical(rows, row, column, are_lines, hidden, total);
            }
        }
    }
}

namespace kernels {

template <class T>
KCCL_KERNEL_OF(kPieceColumns)
void rms_norm(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::rms_norm(block(), NormedRows<T>(call), platform::block_in_grid(),
                   platform::blocks_per_grid());
}

}  // namespace kernels
}  // namespace kccl
