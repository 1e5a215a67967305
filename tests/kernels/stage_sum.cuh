// Sums the words of an array that streams through a ring, each times its number. So the sum is
// wrong if a copy is lost, late, out of order or overwritten too early.
#pragma once

#include <kccl/kccl.cuh>

namespace kccl {

using SumRing = Ring<4, 512>;

// Called by all threads of one block. call.input: call.count words, a multiple of 4, aligned to 16
// bytes; call.output: a 64-bit sum for each thread; call.peer: how many copies may be in flight. No
// thread waits for the last num_left copies, which are at most as many as the ring has stages.
//
// The block's last warp copies; a block of one warp does both.
KCCL_DEVICE Status stage_sum(const Call& call, uint64_t num_left = 0) {
    KCCL_BLOCK_SHARED(SumRing, ring);
    constexpr uint64_t kWords = SumRing::kStageBytes / 4;
    const auto* in = reinterpret_cast<const uint32_t*>(call.input);
    const uint64_t num_copies = (call.count + kWords - 1) / kWords;
    const uint64_t num_consumed = num_copies - num_left;
    const uint32_t me = platform::thread_in_block();
    const uint32_t num_warps = platform::threads_per_block() / platform::kWarpSize;
    const bool is_alone = num_warps == 1;
    const uint32_t num_consumers = is_alone ? 1 : num_warps - 1;
    init_ring(block(), ring, num_consumers);

    Producer<SumRing> producer(ring, call.comm);
    Consumer<SumRing> consumer(ring, call.comm);
    const auto in_flight = static_cast<uint32_t>(call.peer);
    const auto words_of = [&](uint64_t n) {
        const uint64_t rest = call.count - n * kWords;
        return static_cast<uint32_t>(rest < kWords ? rest : kWords);
    };
    bool failed = false;
    uint64_t sum = 0;
    if (!is_alone && me / platform::kWarpSize == num_consumers) {
        for (uint64_t n = 0; n < num_copies && !failed; ++n) {
            failed = producer.push(in + n * kWords, words_of(n) * 4, in_flight) != kKcclOk;
        }
    } else {
        uint64_t pushed = is_alone ? 0 : num_copies;
        for (uint64_t n = 0; n < num_consumed && !failed; ++n) {
            while (pushed < num_copies &&
                   producer.try_push(in + pushed * kWords, words_of(pushed) * 4, in_flight)) {
                ++pushed;
            }
            // Every other copy is taken at once if it is there.
            const uint8_t* stage = n % 2 != 0 ? consumer.try_front() : nullptr;
            if (stage == nullptr) stage = consumer.front();
            const auto* words = reinterpret_cast<const uint32_t*>(stage);
            failed = words == nullptr;
            if (failed) continue;
            for (uint32_t i = me; i < words_of(n); i += num_consumers * platform::kWarpSize) {
                sum += mem::load_plain(words + i) * (n * kWords + i + 1);
            }
            consumer.pop();
        }
    }
    producer.drain();
    mem::store_plain(reinterpret_cast<uint64_t*>(call.output) + me, sum);
    return block().any(failed) ? status_of(call.comm) : kKcclOk;
}

namespace kernels {

KCCL_KERNEL void stage_sum(KCCL_KERNEL_PARAM(KcclCall) call) { kccl::stage_sum(call); }

// Does not wait for the last two copies.
KCCL_KERNEL void stage_leave(KCCL_KERNEL_PARAM(KcclCall) call) { kccl::stage_sum(call, 2); }

}  // namespace kernels
}  // namespace kccl
