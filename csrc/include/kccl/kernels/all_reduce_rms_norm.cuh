// all_reduce_rms_norm: all_reduce, residual and RMSNorm of rows in one kernel, for GPUs.
//
//     rank r:  row of in --pack--> slot[r] in every rank's window    (world_size - 1) * 2 * n bytes
//              slot[0..] of its own window --reduce, add the residual--> hidden --normalise--> out
//
// The packets are those of all_reduce_one_shot_ll16, and every rank reduces all of them. A block
// takes whole rows, because a row's sum of squares is needed before its first element is stored.
// Each piece of a row is a call of its own on the block's channel. channel.cuh says why the next
// call may use the slots again. The sync at its end orders the group sums of norm.cuh too.
//
// all_reduce followed by rms_norm gives the same bits: both round the sum over the ranks to the
// element type before the residual is added.
#pragma once

#include "../exchange.cuh"
#include "../norm.cuh"

namespace kccl {

// One call of a piece: the payloads that a thread takes are kWarpSize apart, so that the threads of
// a warp take neighbours, and the loads of both overlap.
struct PairOfPayloads {
    KCCL_DEVICE PairOfPayloads(uint32_t index, uint32_t num)
        : first(index / platform::kWarpSize * 2 * platform::kWarpSize +
                index % platform::kWarpSize),
          second(first + platform::kWarpSize),
          has_first(first < num),
          has_second(second < num),
          last(num - 1) {}

    // How many threads it takes: whole warps.
    KCCL_DEVICE static uint32_t num_pairs(uint32_t num) {
        constexpr uint32_t kWarpPayloads = 2 * platform::kWarpSize;
        return (num + kWarpPayloads - 1) / kWarpPayloads * platform::kWarpSize;
    }
    // A payload that exists, for a thread that polls with its warp.
    KCCL_DEVICE uint32_t polled(uint32_t i) const { return i < last ? i : last; }

    uint32_t first, second;
    bool has_first, has_second;
    uint32_t last;
};

// Called by all threads of the channel's coop, for one row after another. `turn` counts pieces.
// The sum with the residual is stored over the residual, or in `out` if there is none; then the
// result must have type T. All threads get the same status; unless it is ok, both are undefined.
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_rms_norm(Channel<Coop, WORLD_SIZE>& channel,
                                       const NormedRows<T>& rows, uint64_t row, GroupSums& sums,
                                       uint32_t& turn) {
    constexpr int kRanks = kMaxRanks<WORLD_SIZE>;
    const uint64_t begin = row * rows.width;
    const T* const in = rows.in + begin;
    const bool adds = rows.residual != nullptr;
    T* const hidden = (adds ? rows.residual : static_cast<T*>(rows.out)) + begin;
    const uint32_t num = num_payloads<T>(rows.width);
    // A call has whole groups.
    const auto slot = static_cast<uint32_t>(channel.max_bytes() / kPayloadBytes);
    const uint32_t most =
        slot < kPiecePayloads ? slot / kGroupPayloads * kGroupPayloads : kPiecePayloads;
    const bool all_words = are_words(in, rows.width) && are_words(hidden, rows.width);
    float total = 0;
    for (uint32_t piece = 0; piece < num; piece += kPiecePayloads) {
        float* const groups = sums.of[turn++ % 2];
        const uint32_t rest = num - piece;
        const uint32_t payloads = rest < kPiecePayloads ? rest : kPiecePayloads;
        for (uint32_t done = 0; done < payloads; done += most) {
            const uint32_t left = payloads - done;
            const uint32_t count = left < most ? left : most;
            const uint32_t at = piece + done;
            const auto send_one = [&](uint32_t i, bool are_words) {
                ll16::push(channel, i, load_payload(in, at + i, rows.width, are_words));
                mem::prefetch(hidden + num_elements<T>(at + i));
                mem::prefetch(rows.weight + num_elements<T>(at + i));
            };
            const auto send = [&](uint32_t index, bool are_words) {
                const PairOfPayloads pair(index, count);
                if (pair.has_first) send_one(pair.first, are_words);
                if (pair.has_second) send_one(pair.second, are_words);
            };
            const auto take_one = [&](uint32_t i, bool is_mine, bool are_words,
                                      const uint64_t (&inputs)[kRanks]) {
                uint64_t sum[1];
                reduce_unit<T, Sum, kRanks>(sum, inputs, 1, channel.world_size());
                if (is_mine) {
                    if (adds) {
                        const uint64_t more = load_payload(hidden, at + i, rows.width, are_words);
                        sum[0] = add_payloads<T>(sum[0], more);
                    }
                    store_payload(hidden, at + i, rows.width, sum[0], are_words);
                }
                add_to_group<T>(groups, done + i, is_mine, sum[0]);
            };
            const auto take = [&](uint32_t index, bool is_mine, bool are_words) {
                const PairOfPayloads pair(index, count);
                uint64_t first[kRanks], second[kRanks];
                if (!ll16::await_both(channel, pair.polled(pair.first), pair.polled(pair.second),
                                      first, second)) {
                    return false;
                }
                take_one(pair.first, is_mine && pair.has_first, are_words, first);
                take_one(pair.second, is_mine && pair.has_second, are_words, second);
                return true;
            };
            const Status status = ll16::exchange<platform::DefaultFloats>(
                channel, kKcclAllReduceRmsNorm, Exchange::kPairwise,
                PairOfPayloads::num_pairs(count), all_words, send, take);
            if (status != kKcclOk) return status;
        }
        total += sum_of_groups(groups, payloads);
    }
    store_normalised(channel.coop(), rows, hidden, row, total);
    return kKcclOk;
}

namespace kernels {

template <class T, int WORLD_SIZE>
KCCL_KERNEL_OF(512)
void all_reduce_rms_norm(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    const NormedRows<T> rows(call);
    KCCL_BLOCK_SHARED(GroupSums, sums);
    uint32_t turn = 0;
    for (uint64_t row = platform::block_in_grid(); rows.has(row);
         row += platform::blocks_per_grid()) {
        if (kccl::all_reduce_rms_norm(channel, rows, row, sums, turn) != kKcclOk) return;
    }
}

}  // namespace kernels
}  // namespace kccl
