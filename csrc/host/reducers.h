// Functions that reduce, which kernels call by pointers. A kernel that reduces moves bytes, and is
// not compiled for each type and operator. It finds the functions for the type and the operator of
// its call in a table. So a further type costs the host core only two small functions for each
// operator.
//
// Kernels for long messages lose nothing by such a call, because they make one for many elements.
// The smallest messages pay a call for each packet. Between two ranks its operands and its result
// stay in registers, and the function's address is loaded before the call waits for its peer: it
// costs 0 to 5 ns (bench/LOG.md, 2026-11-29). An inlined reduction would need an instance of the
// kernel for each type and operator, which was two thirds of what compiling the kernels took.
#pragma once

#include "../include/kccl/reduce.cuh"

namespace kccl::host {
namespace {

// The functions that reduce elements of one type by one operator.
struct Reducer {
    // pair() is for two ranks, and null if an element is longer than a payload. The others do what
    // reduce_unit() and reduce_rows() of reduce.cuh do.
    uint64_t (*pair)(uint64_t first, uint64_t second);
    void (*unit)(uint64_t* result, const uint64_t* payloads, int stride, int world_size);
    void (*rows)(void* out, const void* const* rows, int world_size, uint64_t count);
    uint32_t log2_bytes;  // an element has 1 << log2_bytes bytes
};

struct ReducerTable {
    Reducer at[kKcclNumDtypes][kKcclNumOps];
};

// Returns the Reducer for the type and the operator of a call. kernel_table.inc defines this
// function.
const Reducer& reducer_of(const KcclCall& call);

// The element type of kernels whose operator is Tabled. SIZE: mostly 1, and then call.count is in
// bytes, see kccl_host_bind(). 16 in calls that send elements of 16 bytes in payloads, which must
// not cut an element.
template <uint32_t SIZE>
struct Raw {
    uint8_t bytes[SIZE];
};

// The operator of kernels that find their Reducer at run time, by the type and the operator in
// their call.
class Tabled {
  public:
    static constexpr bool kIsTold = true;
    static constexpr bool kReduces = true;

    explicit Tabled(const KcclCall& call) : reducer_(reducer_of(call)), pair_(reducer_.pair) {}

    template <int MAX_RANKS, uint32_t WORDS>
    KCCL_DEVICE void reduce_unit(uint64_t (&result)[WORDS], const uint64_t* payloads, int stride,
                                 int world_size) const {
        if constexpr (MAX_RANKS == 2 && WORDS == 1) {
            if (world_size == 2) {
                result[0] = pair_(payloads[0], payloads[stride]);
                return;
            }
        }
        reducer_.unit(result, payloads, stride, world_size);
    }
    template <class T>
    KCCL_DEVICE void reduce_rows(T* out, const T* const* rows, int world_size,
                                 uint64_t count) const {
        reducer_.rows(out, reinterpret_cast<const void* const*>(rows), world_size,
                      count * sizeof(T) >> reducer_.log2_bytes);
    }

  private:
    const Reducer& reducer_;
    uint64_t (*pair_)(uint64_t first, uint64_t second);
};

template <class T, class Op>
uint64_t reduce_pair(uint64_t first, uint64_t second) {
    const uint64_t payloads[] = {first, second};
    return reduce_payloads<T, Op, 1, 2>(payloads, 2);
}

template <class T, class Op>
constexpr auto pair_of() -> uint64_t (*)(uint64_t, uint64_t) {
    if constexpr (kUnitPayloads<T> == 1) {
        return reduce_pair<T, Op>;
    } else {
        return nullptr;
    }
}

template <class T, class Op>
void reduce_one_unit(uint64_t* result, const uint64_t* payloads, int stride, int world_size) {
    uint64_t unit[kUnitPayloads<T>];
    reduce_unit<T, Op, kKcclMaxWorldSize>(unit, payloads, stride, world_size);
    platform::copy_bytes(result, unit, sizeof(unit));
}

// Does what RowsReducer says (host.h). Reduces a tile of the rows at a time: takes the tile of one
// row after the other into accumulators that stay in the L1 cache. So one loop serves all world
// sizes.
template <class T, class Op>
void reduce_tiles(void* out, const void* const* rows, int world_size, uint64_t count) {
    using Acc = typename Element<T>::Acc;
    constexpr uint64_t kTile = 2048 / sizeof(Acc);
    Acc acc[kTile];
    auto* result = static_cast<uint8_t*>(out);
    for (uint64_t begin = 0; begin < count; begin += kTile) {
        const uint64_t n = count - begin < kTile ? count - begin : kTile;
        const auto element = [&](int rank, uint64_t i) {
            return mem::load_plain(static_cast<const T*>(rows[rank]) + begin + i);
        };
        for (uint64_t i = 0; i < n; ++i) acc[i] = Element<T>::widen(element(0, i));
        for (int rank = 1; rank < world_size; ++rank) {
            for (uint64_t i = 0; i < n; ++i) {
                acc[i] = Op::template apply<T>(acc[i], Element<T>::widen(element(rank, i)));
            }
        }
        T* const to = reinterpret_cast<T*>(result) + begin;
        KCCL_INDEPENDENT
        for (uint64_t i = 0; i < n; ++i) {
            mem::store_plain(to + i, Element<T>::narrow(Op::finish(acc[i], world_size)));
        }
    }
}

// Does what RowsReducer says, by reduce_rows(), which has a loop for each world size. It is faster
// than reduce_tiles(), with more code.
template <class T, class Op>
void reduce_whole_rows(void* out, const void* const* rows, int world_size, uint64_t count) {
    const T* inputs[kKcclMaxWorldSize];
    for (int rank = 0; rank < world_size; ++rank) inputs[rank] = static_cast<const T*>(rows[rank]);
    reduce_rows<T, Op>(block(), static_cast<T*>(out), inputs, world_size, count);
}

template <class T>
constexpr uint32_t kLog2Bytes = __builtin_ctz(sizeof(T));
template <class T, class Op>
constexpr Reducer kTileReducer = {pair_of<T, Op>(), reduce_one_unit<T, Op>, reduce_tiles<T, Op>,
                                  kLog2Bytes<T>};
template <class T, class Op>
constexpr Reducer kRowReducer = {pair_of<T, Op>(), reduce_one_unit<T, Op>, reduce_whole_rows<T, Op>,
                                 kLog2Bytes<T>};

}  // namespace
}  // namespace kccl::host
