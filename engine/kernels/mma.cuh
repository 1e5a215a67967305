// How a warp multiplies: a tile of 16 rows x 16 columns with elements of 16 bits, times up to
// kVectors vectors, added up in FP32. A file for each target defines how the tile is packed and
// what each thread of the warp holds. Ops do not depend on that.
//
// A vector is FP32. It is split into two parts of the tile's type, high = T(x) and low = T(x -
// high), which the matrix unit multiplies as two columns. It has columns to spare, so this costs no
// time. The sums are as exact as products of FP32 vectors that are rounded to twice T's precision;
// with f16 at best to multiples of 2^-24. A value that T cannot hold makes all sums of its vector
// NaN: f16 ends at 65504. With T WideF16, elements are f16, and the parts of a vector have factors:
// x = 256 * high + low / 8. So it holds values up to 1.6e7, and multiples of 2^-27.
//
//   Mma<T>::offset(row, column)     where an element lies in a packed tile, in bytes
//   Mma<T>::key_row(position), position_of(key_row)
//                                   which row of a tile of the cache has the key of a position,
//                                   counted in the tile (query_mma.cuh)
//   Mma<T>::Lane(num_vectors, stride)
//                                   which part of everything this thread has: made once for many
//                                   products. The float4s of a vector lie `stride` float4s behind
//                                   those of the vector before
//   Mma<T>::StreamingLane           a Lane whose packed(), scales(), row_bytes() and zeros() read
//                                   global memory that is read once
//   lane.weights(tile)              this thread's part of a tile, in shared or global memory
//   lane.streamed(tile)             the same of a tile in global memory that is read once
//   lane.inputs(staged)             this thread's part of 16 elements of each vector. Those of the
//                                   first one are at `staged`, in shared memory
//   lane.paired(staged)             this thread's part of 32 elements of a vector, those of two
//                                   tiles, which PairedFloat4s have staged. Not on AMD's GPUs
//   lane.gather(at)                 where vectors that do not lie behind each other are: at(vector)
//                                   returns where 16 elements of one begin. gather.behind(offset)
//                                   has those that begin so many float4s behind them
//   lane.inputs(gather, offset)     this thread's part of 16 elements of these vectors, so many
//                                   float4s behind those that at() has returned
//   lane.load_sums<SUMS>(at)        sums that store_sums(sums, at) has stored: at(vector) returns
//                                   where those of a vector are, kSumsLines lines, or null. SUMS:
//                                   Sums or Scaled
//   Mma<T>::multiply(sums, weights, inputs)
//                                   adds the products. Called by all threads of the warp
//   lane.scale(sums, factors)       multiplies the sums of vector v by factors[v], in shared memory
//   lane.totals(sums, f)            calls f(row, vector, sum) for each sum that this thread has.
//                                   Called by all threads of the warp; a thread without a sum gets
//                                   row kTileRows. Sums of vectors behind the last one mean nothing
//   lane.for_each_place(f)          calls f(row, vector) in the same order: Mma<T>::kTotals calls
//
// For formats whose values have BITS bits, 8 or 4, and share scales:
//
//   Mma<T>::place_of(i)             the row and column of a packed tile's i-th element
//   lane.packed<BITS>(tile)         this thread's part of a tile, in words
//   Mma<T>::words_of(fours)         what multiply() takes, from elements of 16 bits: four for each
//                                   4 * BITS bits of packed(). In all of a thread's fours, the
//                                   first two are of one row, and so are the last two
//   lane.scales<SCALE>(scales)      this thread's part of an array with a scale for each row, that
//                                   of row r at index scale_at(r)
//   lane.row_bytes<NUM>(bytes)      this thread's part of an array with NUM bytes for each row: 1,
//                                   2, 4 or 8. Those of row r begin at NUM * scale_at(r). Its
//                                   member skip(n) drops the first n of each row
//   Mma<T>::scaled(scales, bytes, i)
//                                   scales times byte i of their rows, less 128: for add_scaled()
//   lane.zeros(zeros)               the same of an array of bytes: those of the rows of the first
//                                   two and of the last two of each four
//   Mma<T>::add_scaled(scaled, sums, scales)
//                                   adds sums, times their rows' scales, to those in Scaled
//   lane.totals(scaled, f)          as for sums
//   lane.store_parts(sums, to)      stores the sums of row 0, kParts floats for each vector, in
//                                   shared memory
//   Mma<T>::sums_of(from)           sums of which each row has those that store_parts() has stored
//                                   of one vector, from there on, for the first vector
#pragma once

#include "abi.cuh"

#if defined(KCCL_TARGET_HIP)
// From here on, in all kernels of the engine: every product and every sum is rounded. By default
// clang rounds some pairs of them once, and which ones differs from kernel to kernel. Then the
// cache would get other bits from prefill than from decode.
#pragma clang fp contract(off)
#endif

#include "math.cuh"

namespace kccl::decode {

constexpr uint32_t kTileRows = kKcclDecodeTileRows;
constexpr uint32_t kTileColumns = kKcclDecodeTileColumns;
// The bytes of a tile of 16-bit elements. Each format gives the size of its own tiles (format.cuh).
constexpr uint32_t kTileBytes = 2 * kTileRows * kTileColumns;

// Four values.
struct alignas(16) Float4 {
    float value[4];
};
static_assert(sizeof(Float4) == kKcclDecodeFloat4Bytes, "no padding");

// Splits four values of a vector into the form in which they lie in shared memory before a product.
struct alignas(16) StagedFloat4 {
    uint32_t high[2];
    uint32_t low[2];
};
constexpr uint32_t kTileFloat4s = kTileColumns / 4;

// Returns one part of a split float4 in a word.
KCCL_DECODE uint64_t joined(const uint32_t (&part)[2]) { return part[0] | uint64_t{part[1]} << 32; }

// How two tiles' float4s are staged in pairs, in the place of as many StagedFloat4s: the parts of
// float4 i of one tile lie beside those of float4 i of the other. So a thread loads its inputs of
// both tiles by one instruction.
struct PairedFloat4s {
    uint64_t high[2];  // of each tile
    uint64_t low[2];
};
// A thread's inputs of two tiles.
template <class INPUTS>
struct alignas(16) OfTwoTiles {
    INPUTS tile[2];
};

// Where an element lies in a tile.
struct Place {
    uint32_t row;
    uint32_t column;
};

// Returns a scale in FP32.
KCCL_DECODE float widened(float scale) { return scale; }
KCCL_DECODE float widened(f16 scale) { return Element<f16>::widen(scale); }

// Returns a byte less 128 in FP32: the bits of an integer in the mantissa of 2^23 make 2^23 plus
// the integer.
KCCL_DECODE float byte_less_128(uint32_t byte) {
    return platform::bit_cast<float>(byte | 0x4b000000) - 8388736.0f;
}

template <uint32_t NUM>
struct RowBytesWord {
    using Type = uint32_t;
};
template <>
struct RowBytesWord<8> {
    using Type = uint64_t;
};

template <class T>
constexpr bool kIsBfloat16 = false;
template <>
inline constexpr bool kIsBfloat16<bf16> = true;

// An element type that weights of 8 and 4 bits become: f16, whose range is extended for the
// vectors.
struct WideF16 {};

// The parts of a split number: x = kHigh * high + kLow * low.
template <class T>
struct Parts {
    using Type = T;
    static constexpr float kHigh = 1, kLow = 1;
};
template <>
struct Parts<WideF16> {
    using Type = f16;
    // The largest rest of a high part, 2^12, is 2^15 in the low part.
    static constexpr float kHigh = 256, kLow = 0.125f;
};

// A value that T cannot hold, or an infinity, becomes an infinity and its opposite. Their sum is
// NaN.
template <class T>
KCCL_DECODE StagedFloat4 split(const Float4& four) {
    using Part = typename Parts<T>::Type;
    // Powers of two, so products with them are exact.
    constexpr float kHigh = Parts<T>::kHigh, kToHigh = 1 / kHigh, kToLow = 1 / Parts<T>::kLow;
    StagedFloat4 staged;
    KCCL_UNROLL
    for (int pair = 0; pair < 2; ++pair) {
        const float a = four.value[2 * pair], b = four.value[2 * pair + 1];
        const uint32_t high = Element<Part>::narrow_pair(a * kToHigh, b * kToHigh);
        const float rest_a = a - kHigh * Element<Part>::widen(Part{static_cast<uint16_t>(high)});
        const float rest_b =
            b - kHigh * Element<Part>::widen(Part{static_cast<uint16_t>(high >> 16)});
        staged.high[pair] = high;
        staged.low[pair] = Element<Part>::narrow_pair(rest_a * kToLow, rest_b * kToLow);
    }
    return staged;
}

}  // namespace kccl::decode

#if defined(KCCL_TARGET_CUDA)
#include "targets/mma_cuda.cuh"
#elif defined(KCCL_TARGET_HIP)
#include "targets/mma_hip.cuh"
#else
#include "targets/mma_loop.cuh"
#endif
