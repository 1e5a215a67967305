// Converts matrices in MXFP4 from the layout of Hugging Face's files (files/pairs.py) to that in
// which the engine stores them (formats/mxfp4.py), on the device. The host then only copies.
#pragma once

#include "device.cuh"

namespace kccl::decode {

// Writes the product of one expert as weights.py joins it. Called by all threads of a grid.
//
// pairs, scales: the blocks of 16 bytes and their scales, [rows][lanes][blocks]. rows, lanes,
// blocks: the product's rows; the lanes whose columns lie side by side, and the blocks of 32
// columns that each of them has. has_two: the rows of two matrices alternate, in the file row by
// row, in the product HALF rows of each.
template <uint32_t HALF>
KCCL_DECODE void pair(uint8_t* out, const uint8_t* pairs, const uint8_t* scales, uint64_t rows,
                      uint64_t lanes, uint64_t blocks, uint64_t has_two) {
    constexpr uint32_t kBytes = 16;
    const uint64_t num = rows * lanes * blocks;
    const uint64_t step = uint64_t{platform::blocks_per_grid()} * platform::threads_per_block();
    const uint64_t begin = uint64_t{platform::block_in_grid()} * platform::threads_per_block() +
                           platform::thread_in_block();
    for (uint64_t i = begin; i < num; i += step) {
        const uint64_t row = i / (lanes * blocks), in_row = i % (lanes * blocks);
        const uint64_t alternating = 2 * (row / (2 * HALF) * HALF + row % HALF) + row / HALF % 2;
        const uint64_t from = (has_two != 0 ? alternating : row) * (lanes * blocks) + in_row;
        uint8_t* const to = out + i * (kBytes + 1);
        mem::store_plain(to, mem::load_plain(scales + from));
        const uint8_t* const block = pairs + from * kBytes;
        KCCL_UNROLL
        for (uint32_t j = 0; j < kBytes / 2; ++j) {
            // Columns 2 j and 2 j + 1, and 16 columns behind them.
            const uint32_t first = mem::load_plain(block + j);
            const uint32_t second = mem::load_plain(block + kBytes / 2 + j);
            const uint32_t even = (first & 15) | (second & 15) << 4;
            mem::store_plain(to + 1 + 2 * j, static_cast<uint8_t>(even));
            mem::store_plain(to + 2 + 2 * j, static_cast<uint8_t>(first >> 4 | (second & 0xf0)));
        }
    }
}

}  // namespace kccl::decode
