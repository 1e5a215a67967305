// Small calls by postings, many in one launch of each rank: 20 broadcasts, in which the root may
// run ahead, then 20 gathers, in which the others may, then the same with the next root.
#pragma once

#include <kccl/kccl.cuh>
#include <kccl/postings.cuh>

namespace kccl::kernels {

constexpr uint32_t kPostedWords = 3;

// in: [call][word], what this rank posts. out: [call][source][word and, behind them, the bytes of
// the call], what it takes.
template <uint64_t SLOTS>
KCCL_KERNEL void posted_calls(KCCL_KERNEL_PARAM(DeviceComm) comm_parameter,
                              KCCL_KERNEL_PARAM(KcclWindow) window_parameter, uint32_t calls,
                              const uint32_t* in, uint32_t* out) {
    const DeviceComm& comm = platform::first_parameter(comm_parameter);
    const KcclWindow& window = window_parameter;
    if (!leads(block())) return;
    const auto wait = [](int, auto is_there) {
        while (!is_there()) mem::poll_pause();
        return true;
    };
    Postings<SLOTS> postings(window.address, 0, comm.rank, comm.world_size, 0);
    for (uint32_t call = 0; call < calls; ++call) {
        const int root = static_cast<int>(call / 40) % comm.world_size;
        const bool is_broadcast = call / 20 % 2 == 0;
        if (!postings.begin(wait)) return;
        if (is_broadcast == (comm.rank == root)) {
            auto* const room = reinterpret_cast<uint32_t*>(postings.room());
            for (uint32_t word = 0; word < kPostedWords; ++word) {
                mem::store_plain(room + word, mem::load_plain(in + call * kPostedWords + word));
            }
        }
        postings.post(call, root);
        for (int source = 0; source < comm.world_size; ++source) {
            const bool is_taken = is_broadcast ? source == root : comm.rank == root;
            if (source == comm.rank || !is_taken) continue;
            if (!postings.await(source, wait)) return;
            uint32_t* const taken =
                out + (uint64_t{call} * comm.world_size + source) * (kPostedWords + 1);
            const auto* const part = reinterpret_cast<const uint32_t*>(postings.part_of(source));
            for (uint32_t word = 0; word < kPostedWords; ++word) {
                mem::store_plain(taken + word, mem::load_plain(part + word));
            }
            mem::store_plain(
                taken + kPostedWords,
                static_cast<uint32_t>(mem::load_plain(&postings.head(source)->num_bytes)));
        }
    }
}

}  // namespace kccl::kernels
