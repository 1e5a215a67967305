// Which blocks of a lane group have one row tile more of a product than the others, where its row
// tiles do not divide evenly: consecutive ones, which begin with a certain block. All blocks shall
// have about equally many bytes of a layer. Those with an extra row tile of Qkv are the first ones.
#pragma once

#include "abi.cuh"

namespace kccl::decode {

// BLOCKS: the blocks of the lane group. The others are rows of products, over all of its lanes.
// Out, Down and ExpertDown have HIDDEN rows, and are cut in the same way. kGateUp, kOut and kRouter
// are numbers of blocks, from which on blocks have an extra row tile.
template <uint32_t BLOCKS, uint32_t QKV, uint32_t GATE_UP, uint32_t HIDDEN, bool HAS_EXPERTS>
struct Balance {
    // Return how many blocks have an extra row tile of so many rows, and how many have none.
    KCCL_CONSTEXPR static uint32_t num_longer(uint32_t rows) {
        return rows / kKcclDecodeTileRows % BLOCKS;
    }
    KCCL_CONSTEXPR static uint32_t num_shorter(uint32_t rows) {
        return (BLOCKS - num_longer(rows)) % BLOCKS;
    }
    // The first blocks have one row tile fewer of GateUp, and those behind them one fewer of Out
    // and Down.
    static constexpr uint32_t kGateUp = num_shorter(GATE_UP);
    static constexpr uint32_t kOut = (kGateUp + num_shorter(HIDDEN)) % BLOCKS;
    static constexpr uint32_t kRouter = 0;
};

// In a mixture of experts, a row tile of ExpertDown has the columns of all chosen experts, and one
// of ExpertGateUp is small. So the blocks with an extra one of Out and ExpertDown come right behind
// those with one of Qkv, and the first of them have one fewer of ExpertGateUp. Behind them come the
// blocks with one of the router. GATE_UP: the rows of all chosen experts.
template <uint32_t BLOCKS, uint32_t QKV, uint32_t GATE_UP, uint32_t HIDDEN>
struct Balance<BLOCKS, QKV, GATE_UP, HIDDEN, true> {
    using Dense = Balance<BLOCKS, QKV, GATE_UP, HIDDEN, false>;
    static constexpr uint32_t kOut = Dense::num_longer(QKV);
    static constexpr uint32_t kGateUp = (kOut + Dense::num_shorter(GATE_UP)) % BLOCKS;
    static constexpr uint32_t kRouter = (kOut + Dense::num_longer(HIDDEN)) % BLOCKS;
};

}  // namespace kccl::decode
