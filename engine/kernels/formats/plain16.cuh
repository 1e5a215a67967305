// The common base of formats whose values have 16 bits and go to the matrix unit as they are. It
// has the functions that format.cuh asks of a format. T: the element type.
#pragma once

#include "../mma.cuh"

namespace kccl::decode {

template <class T>
struct Plain16 {
    using Operand = T;
    using Stored = typename Mma<T>::Weights;
    using Lane = typename Mma<T>::Lane;
    static constexpr bool kHasMinimums = false;
    static constexpr uint32_t kTileBytes = decode::kTileBytes, kStripTiles = 1, kScaleBytes = 0;

    KCCL_DECODE static Stored load(const Lane& lane, const uint8_t* tile) {
        return lane.weights(tile);
    }
    KCCL_DECODE static Stored streamed(const Lane& lane, const uint8_t* tile) {
        return lane.streamed(tile);
    }
    KCCL_DECODE static const Stored& operand(const Stored& stored) { return stored; }

    KCCL_DECODE static void pack(uint8_t* tile, const uint8_t* rows, uint64_t row, uint64_t first,
                                 uint64_t columns, uint32_t num) {
        const auto* const values = reinterpret_cast<const uint16_t*>(rows);
        for (uint32_t at = warp().index(); at < kTileRows * kTileColumns; at += warp().size()) {
            const uint32_t in_tile = at / kTileColumns, within = at % kTileColumns;
            const uint64_t from = (row + in_tile) * columns + first + within;
            const uint16_t value = within < num ? mem::load_plain(values + from) : uint16_t{0};
            auto* const to = reinterpret_cast<uint16_t*>(tile + Mma<T>::offset(in_tile, within));
            mem::store_plain(to, value);
        }
    }

    KCCL_DECODE static Float4 four(const uint8_t* rows, uint64_t i) {
        const uint64_t four = mem::load_plain(reinterpret_cast<const uint64_t*>(rows) + i);
        Float4 values;
        KCCL_UNROLL
        for (int k = 0; k < 4; ++k) {
            values.value[k] = Element<T>::widen({static_cast<uint16_t>(four >> 16 * k)});
        }
        return values;
    }
};

}  // namespace kccl::decode
