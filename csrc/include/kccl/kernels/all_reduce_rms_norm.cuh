// all_reduce_rms_norm: reduces rows over all ranks, adds the residual and normalises the sum
// (RMSNorm), in one kernel, for GPUs.
//
//     rank r:  row of in --pack--> slots in every peer's window      (world_size - 1) * 2 * n bytes
//              in + slots of its own window + residual = hidden --normalise--> out
//
// n is the length of a row in bytes. A block computes whole rows, because a row's sum of squares is
// needed before its first element is stored. Before the wait, each thread loads a column
// (columns.cuh) of in, residual and weight into registers. Every rank reduces all rows. A rank
// sends itself nothing; PeerPlace says for what its own slot is used. Each row is a call on the
// block's channel; channel.cuh says why the next call may use the slots again.
//
// all_reduce followed by rms_norm gives the same bits: both round the sum over the ranks to the
// element type before the residual is added.
#pragma once

#include "../columns.cuh"
#include "../exchange.cuh"

namespace kccl {

// How many packets from each rank a thread waits for at a time. Until all of them have come, it
// holds them in registers. So with more than four ranks, or an unknown number (WORLD_SIZE 0), it
// waits for two packets of each rank; with fewer, for a whole column's.
template <int WORLD_SIZE>
constexpr uint32_t kPacketsAtOnce = WORLD_SIZE > 0 && WORLD_SIZE <= 4 ? kColumnPayloads : 2;

// The most threads of a block. With two ranks they hold a row that fills two slots. With more ranks
// they are half as many, so that each has more registers for packets.
template <int WORLD_SIZE>
constexpr uint32_t kMostNormThreads = WORLD_SIZE == 2 ? kPieceColumns : kPieceColumns / 2;

// The part of a row that a thread holds in registers: one column.
template <class T>
struct HeldColumn {
    // index: the thread's number in the block. A thread behind the last column holds zeros, and
    // polls the last column together with its warp.
    KCCL_DEVICE HeldColumn(const NormedRows<T>& rows, uint32_t index)
        : is_mine(index < rows.num_columns()), number(is_mine ? index : rows.num_columns() - 1) {}

    KCCL_DEVICE void load(const NormedRows<T>& rows, uint64_t row, bool are_lines) {
        if (!is_mine) return;
        const uint64_t begin = row * rows.width;
        load_column(hidden, rows.in + begin, number, rows.width, are_lines);
        if (rows.residual != nullptr) {
            load_column(residual, rows.residual + begin, number, rows.width, are_lines);
        }
        load_column(weight, rows.weight, number, rows.width, are_lines);
        if (rows.fp8_scale != nullptr) scale = mem::load_plain(rows.fp8_scale);
    }

    const bool is_mine;
    const uint32_t number;
    uint64_t hidden[kColumnPayloads] = {};  // this rank's input, later the sum over the ranks
    uint64_t residual[kColumnPayloads] = {};
    uint64_t weight[kColumnPayloads] = {};
    float scale = 1;
};

// Reduces and normalises row `row`, of which this thread has loaded its column into `held`. The row
// has at most one column for each thread, and fits in a slot; if there are two ranks, in two slots.
// `turn` counts the rows that this coop has computed. Called by all threads of the channel's coop
// (a thread, warp or block: coop.cuh), for one row after another. All threads get the same status.
// Unless it is ok, the residual and the result are undefined.
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_rms_norm(Channel<Coop, WORLD_SIZE>& channel,
                                       const NormedRows<T>& rows, uint64_t row, bool are_lines,
                                       HeldColumn<T>& held, GroupSums& sums, uint32_t turn) {
    constexpr int kRanks = kMaxRanks<WORLD_SIZE>;
    constexpr uint32_t kAtOnce = kPacketsAtOnce<WORLD_SIZE>;
    float share = 1, scale = 1;
    bool has_failed = !channel.enter(kKcclAllReduceRmsNorm);
    if (!has_failed) {
        // Packets of neighbouring columns lie side by side.
        const ll16::PeerPlace place(
            channel, held.number / kGroupColumns * kGroupPayloads + held.number % kGroupColumns);
        if (held.is_mine) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < kColumnPayloads; ++k) {
                ll16::push_to_peers(channel, place, k * kGroupColumns, held.hidden[k]);
            }
        }
        clear_groups(channel.coop(), sums.piece(turn), rows.num_columns());
        channel.sent();
        share = inverse_now(static_cast<float>(rows.width));
        if (rows.fp8_scale != nullptr) scale = inverse_now(held.scale);
        KCCL_UNROLL
        for (uint32_t k = 0; k < kColumnPayloads; k += kAtOnce) {
            uint64_t inputs[kRanks][kAtOnce];
            KCCL_UNROLL
            for (int rank = 0; rank < kRanks; ++rank) {
                KCCL_UNROLL
                for (uint32_t n = 0; n < kAtOnce; ++n) inputs[rank][n] = held.hidden[k + n];
            }
            has_failed |= !ll16::await_peers<kAtOnce>(channel, place, k * kGroupColumns,
                                                      kGroupColumns, inputs);
            KCCL_UNROLL
            for (uint32_t n = 0; n < kAtOnce; ++n) {
                float sums[kUnitElements<T>];
                widen_payload<T>(sums, inputs[0][n]);
                KCCL_UNROLL
                for (int rank = 1; rank < kRanks; ++rank) {
                    if (rank < channel.world_size()) add_payload<T>(sums, inputs[rank][n]);
                }
                held.hidden[k + n] = round_payload<T>(sums);
            }
        }
        if (rows.residual != nullptr) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < kColumnPayloads; ++k) {
                held.hidden[k] = add_payloads<T>(held.hidden[k], held.residual[k]);
            }
            if (held.is_mine) {
                store_column(rows.residual + row * rows.width, held.number, rows.width, are_lines,
                             held.hidden);
            }
        }
        add_to_group<T>(sums.piece(turn), held.number, held.is_mine, held.hidden);
    }
    const Status status = channel.leave(has_failed);
    // After expect_end(), leave() is no sync. So the threads have not synchronised since they
    // stored the group sums, and do not know each other's status.
    if (channel.coop().any(status != kKcclOk)) return status_of(channel.comm());
    if (held.is_mine) {
        const float total = sum_of_groups(sums.lines(turn));
        const float inverse = inverse_rms(total, share, rows.eps);
        store_normalised(rows, row, held.number, are_lines, held.hidden, held.weight, inverse,
                         scale);
        store_canonical(rows, row, held.number, are_lines, held.hidden, total);
    }
    return kKcclOk;
}

namespace kernels {

template <class T, int WORLD_SIZE>
KCCL_KERNEL_OF(kMostNormThreads<WORLD_SIZE>)
void all_reduce_rms_norm(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    const NormedRows<T> rows(call);
    HeldColumn<T> held(rows, block().index());
    uint64_t row = platform::block_in_grid();
    const uint64_t step = platform::blocks_per_grid();
    // Most calls have a block for each row, and whole lines. They take a path of their own, without
    // a loop, on which the thread's column is loaded while the channel is being opened.
    const bool are_lines = rows.are_lines();
    const bool is_short = platform::kPeels & are_lines & !rows.has(row + step);
    mem::await_kernels_before();
    if (is_short) held.load(rows, row, true);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    KCCL_BLOCK_SHARED(GroupSums, sums);
    if (is_short && channel.is_next_plain()) {
        channel.expect_end();
        kccl::all_reduce_rms_norm(channel, rows, row, true, held, sums, 0);
        return;
    }
    for (uint32_t turn = 0; rows.has(row); row += step, ++turn) {
        // If the path above for one row calls expect_end(), this one does not: see in_rounds().
        if (platform::kExpectsEnd && !platform::kPeels && !rows.has(row + step)) {
            channel.expect_end();
        }
        held.load(rows, row, are_lines);
        if (kccl::all_reduce_rms_norm(channel, rows, row, are_lines, held, sums, turn) != kKcclOk) {
            return;
        }
    }
}

}  // namespace kernels
}  // namespace kccl
