// Draws random matrices in MXFP4 as they are stored, on the device: the twin of files/drawn.py. So
// the experts of a large model with random weights need not come from the host.
#pragma once

#include "device.cuh"

namespace kccl::decode {

KCCL_DECODE uint32_t mixed(uint32_t word) {
    word ^= word >> 16;
    word *= 0x7feb352du;
    word ^= word >> 15;
    word *= 0x846ca68bu;
    return word ^ word >> 16;
}

// Writes the product of one expert as weights.py joins it. Called by all threads of a grid.
//
// rows, lanes, blocks: its rows; the lanes whose columns lie side by side, and the blocks of 32
// columns that each of them has. first: the first row that is taken of a matrix, counted over its
// lanes. keys, scales: Drawn, in the lower half that of the first matrix. has_two: the rows of two
// matrices alternate, HALF rows each.
template <uint32_t HALF>
KCCL_DECODE void draw(uint8_t* out, uint64_t rows, uint64_t lanes, uint64_t blocks, uint64_t first,
                      uint64_t keys, uint64_t scales, uint64_t has_two) {
    constexpr uint32_t kBytes = 17, kWords = 5, kScales = 3;
    const uint64_t num = rows * lanes * blocks;
    const uint64_t step = uint64_t{platform::blocks_per_grid()} * platform::threads_per_block();
    const uint64_t begin = uint64_t{platform::block_in_grid()} * platform::threads_per_block() +
                           platform::thread_in_block();
    for (uint64_t i = begin; i < num; i += step) {
        const uint64_t row = i / (lanes * blocks), lane = i / blocks % lanes;
        const bool is_second = has_two != 0 && row / HALF % 2 != 0;
        const uint64_t in_matrix =
            has_two != 0 ? row / (2 * HALF) * HALF + row % HALF : lane * rows + row;
        const auto counter =
            static_cast<uint32_t>(((first + in_matrix) * blocks + i % blocks) * kWords);
        const auto key = static_cast<uint32_t>(is_second ? keys >> 32 : keys);
        const auto scale = static_cast<uint32_t>(is_second ? scales >> 32 : scales);
        const auto word = [&](uint32_t k) { return mixed(mixed(counter + k) + key); };
        uint8_t* const to = out + i * kBytes;
        mem::store_plain(to, static_cast<uint8_t>(scale + word(4) % kScales));
        KCCL_UNROLL
        for (uint32_t k = 0; k < 4; ++k) {
            const uint32_t four = word(k);
            KCCL_UNROLL
            for (uint32_t j = 0; j < 4; ++j) {
                mem::store_plain(to + 1 + 4 * k + j, static_cast<uint8_t>(four >> 8 * j));
            }
        }
    }
}

}  // namespace kccl::decode
