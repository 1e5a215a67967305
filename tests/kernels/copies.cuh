// Copies with which programs read at once what a call has handed over, and write what it has left.
#pragma once

#include <kccl/kccl.cuh>

namespace kccl {

// In a call's place in the lists of programs.
constexpr uint32_t kCopy = kKcclNumKernels;

// Copies call.count bytes. Unless call.share is 1, the threads take them in the opposite order to
// the library's calls, so that each reads what another thread has written. Block b's part begins
// call.peer * b bytes behind the input and call.channel * b bytes behind the output. It orders
// nothing.
template <class Coop>
KCCL_DEVICE void copy_by_others(Coop coop, const Call& call) {
    const uint64_t block = platform::block_in_grid();
    const uint8_t* in = input_of<uint8_t>(call) + block * call.peer;
    uint8_t* out = output_of<uint8_t>(call) + block * call.channel;
    const uint64_t mine = call.share == 1 ? coop.index() : coop.size() - 1 - coop.index();
    const uint64_t ends = reinterpret_cast<uint64_t>(in) | reinterpret_cast<uint64_t>(out);
    const uint64_t num_words = ends % 8 == 0 ? call.count / 8 : 0;
    for (uint64_t i = mine; i < num_words; i += coop.size()) {
        mem::store_plain(reinterpret_cast<uint64_t*>(out) + i,
                         mem::load_plain(reinterpret_cast<const uint64_t*>(in) + i));
    }
    for (uint64_t i = 8 * num_words + mine; i < call.count; i += coop.size()) {
        mem::store_plain(out + i, mem::load_plain(in + i));
    }
}

}  // namespace kccl
