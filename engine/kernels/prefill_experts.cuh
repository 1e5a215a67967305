// ExpertDown in prefill, and what the experts add to the residual. As in prefill_gate_up.cuh, the
// weights of each expert are read once a chunk, and the sums have the same bits as in decode.
#pragma once

#include "prefill_gate_up.cuh"
#include "prefill_residual.cuh"

namespace kccl::decode {

// ExpertDown: a warp takes one row tile and lane at a time, and of it the part of the columns that
// one of decode's warps has, for a share of the positions, with all experts in ascending order. In
// decode a warp adds up its part over all experts of a position, before the warps' sums are added
// up. So the sums of the share's positions wait in shared memory for the next expert. A block's
// warps have the same part of neighbouring row tiles, so they need the same vectors at about the
// same time.
template <class S>
class ChunkDown {
  public:
    KCCL_DECODE ChunkDown(PrefillConsumer<S>& consumer, uint32_t layer)
        : consumer_(consumer),
          area_(experts_area(consumer)),
          share_(consumer.warp_index() % Choice::kShares),
          sums_(area_.sums[consumer.warp_index()]),
          lane_(Unit::kVectors, kTileFloat4s),
          weights_(experts_at(consumer, layer, ExpertMemory<S>::kDownAt)),
          num_items_(mem::load_plain(&area_.choice.num_experts) * Batch::kBatchesOfPart) {}

    // Called by all consumer warps.
    KCCL_DECODE void run() {
        constexpr uint32_t kUnits = ceil_div(One::kTiles, kAtOnce) * One::kLanes * S::kWarps;
#pragma unroll 1
        for (uint32_t unit = consumer_.block_in_group(); unit < kUnits;
             unit += Shape<S>::kBlocksPerGroup) {
            const uint32_t part = unit % S::kWarps, lane = unit / S::kWarps % One::kLanes;
            const uint32_t tile =
                unit / S::kWarps / One::kLanes * kAtOnce + consumer_.warp_index() / Choice::kShares;
            if (tile >= One::kTiles) break;
            multiply(tile * One::kLanes + lane, part);
            warp().sync();
            for (uint32_t group = 0; group < kGroups; ++group) store(tile, lane, part, group);
        }
    }

  private:
    using C = ChunkLayout<S>;
    using Down = typename Shape<S>::ExpertDown;
    using One = typename Down::One;
    using Batch = ExpertBatch<One, 2048, 64>;
    static_assert(Batch::kTogether == Batch::kBatch, "a batch is multiplied at once");
    using Unit = typename Batch::Unit;
    using Choice = ChunkChoice<S>;
    static constexpr uint32_t kGroups = Choice::kShare / Unit::kVectors;
    // How many row tiles a block's warps have at a time. Neighbouring warps have the shares of one.
    static constexpr uint32_t kAtOnce = S::kChunkWarps / Choice::kShares;
    static_assert(S::kChunkWarps % Choice::kShares == 0 && Choice::kShare % Unit::kVectors == 0 &&
                      S::kChunk % Choice::kShares == 0,
                  "a warp has a share of whole groups");
    static_assert(sizeof(typename Batch::Sums) == sizeof(mem::Line), "a thread's sums");

    // An item is a batch of an expert.
    KCCL_DECODE uint32_t expert_of(uint32_t item) const {
        return mem::load_plain(&area_.choice.experts[item / Batch::kBatchesOfPart]);
    }
    KCCL_DECODE const uint8_t* weights_of_item(uint32_t unit, uint32_t part, uint32_t item) const {
        const uint32_t step = item % Batch::kBatchesOfPart * Batch::kBatch * Batch::kStrip;
        const uint64_t expert = expert_of(item) * Down::kUnitsOfOne * kUnitBytes<S>;
        const uint64_t row = uint64_t{unit} * One::kSteps * One::kStepBytes;
        return weights_ + expert + row + One::strip_at(step, part);
    }

    // Adds up a part of the columns over all experts. Two batches take turns, so that the next
    // ones are on their way.
    KCCL_DECODE void multiply(uint32_t unit, uint32_t part) {
        constexpr uint32_t kLines = Choice::kShare * Unit::kSumsLines;
        for (uint32_t i = warp().index(); i < kLines; i += platform::kWarpSize) {
            mem::store_plain(&sums_[0][0] + i, mem::Line{});
        }
        warp().sync();
        if (num_items_ == 0) return;
        Batch even, odd;
        even.load_all(lane_, weights_of_item(unit, part, 0));
        odd.load_all(lane_, weights_of_item(unit, part, least_of(1, num_items_ - 1)));
        typename Batch::Inputs inputs;
        const uint32_t lane = unit % One::kLanes;
        Batch::load(inputs, lane_, gather(lane, part, 0, 0), C::kStripe);
#pragma unroll 1
        for (uint32_t item = 0; item < num_items_; item += 2) {
            add(even, inputs, unit, part, item);
            if (item + 1 < num_items_) add(odd, inputs, unit, part, item + 1);
        }
    }

    // The positions of this warp's share that pass an item's expert.
    KCCL_DECODE typename Choice::List list_of(uint32_t item) const {
        return area_.choice.list_of(expert_of(item), share_);
    }
    // Where the vectors' part for an item begins.
    KCCL_DECODE static uint32_t tile_of(uint32_t part, uint32_t item) {
        const uint32_t step = item % Batch::kBatchesOfPart * Batch::kBatch * Batch::kStrip;
        return (part * One::kSteps + step) * C::kStripe;
    }
    // Where the hidden vectors of a group have their part for an item: those of the positions from
    // number `from` of the expert's list on.
    KCCL_DECODE typename Unit::Gather gather(uint32_t lane, uint32_t part, uint32_t item,
                                             uint32_t from) const {
        const auto list = list_of(item);
        const auto whole = lane_.gather([&](uint32_t vector) {
            // Behind the last position it comes again, and its sums are not used. A list without
            // positions has one that is not used.
            const uint32_t i = least_of(from + vector, list.num != 0 ? list.num - 1 : 0);
            return act_at(lane, mem::load_plain(list.positions + i));
        });
        return whole.behind(tile_of(part, item));
    }

    // Adds an item's products. `inputs` are those of its first group, and become those of the next
    // item's. The batch then has the weights of the item after that one.
    KCCL_DECODE void add(Batch& batch, typename Batch::Inputs& inputs, uint32_t unit, uint32_t part,
                         uint32_t item) {
        const uint32_t lane = unit % One::kLanes, last = num_items_ - 1;
        const auto list = list_of(item);
        const auto gather_next = gather(lane, part, least_of(item + 1, last), 0);
        const auto operands = batch.operands(0);
        if (list.num == 0) Batch::load(inputs, lane_, gather_next, C::kStripe);
#pragma unroll 1
        for (uint32_t from = 0; from < list.num; from += Unit::kVectors) {
            const auto sums_at = [&](uint32_t vector) {
                const uint32_t i = from + vector;
                return i < list.num ? sums_of(mem::load_plain(list.positions + i)) : nullptr;
            };
            // A position may have another thread for each expert.
            warp().sync();
            auto sums = lane_.template load_sums<typename Batch::Sums>(sums_at);
            if (from == 0) {
                batch.add(sums, operands, 0, inputs, [&](uint32_t tile) {
                    return lane_.inputs(gather_next, tile * C::kStripe);
                });
            } else {
                typename Batch::Inputs others;
                Batch::load(others, lane_, gather(lane, part, item, from), C::kStripe);
                batch.add(sums, operands, 0, others, [&](uint32_t tile) { return others[tile]; });
            }
            lane_.store_sums(sums, sums_at);
        }
        batch.load_all(lane_, weights_of_item(unit, part, least_of(item + 2, last)));
    }

    KCCL_DECODE mem::Line* sums_of(Listed listed) const {
        return sums_[listed.number() - share_ * Choice::kShare];
    }
    // Returns where the hidden vector of a position begins, for the expert that lists it.
    KCCL_DECODE const StagedFloat4* act_at(uint32_t lane, Listed listed) const {
        const uint32_t vector = (consumer_.first_lane_here() + lane) * S::kPlaces + listed.place();
        const uint32_t slot =
            C::kActs + vector * C::Mlp::kTilesOfActs * C::kStripe + listed.number() * kTileFloat4s;
        return reinterpret_cast<const StagedFloat4*>(consumer_.here(slot));
    }

    // Stores the sums of a group of positions.
    KCCL_DECODE void store(uint32_t tile, uint32_t lane, uint32_t part, uint32_t group) {
        const auto sums = lane_.template load_sums<typename Batch::Sums>(
            [&](uint32_t vector) { return sums_[group * Unit::kVectors + vector]; });
        float totals[Unit::kTotals];
        float* total = totals;
        lane_.totals(sums, [&](uint32_t, uint32_t, float sum) { *total++ = sum; });
        auto* const rows = area_.rows[consumer_.warp_index()];
        store_rows(rows, lane_, totals);
        const uint32_t vector = warp().index() / kTileFloat4s, i = warp().index() % kTileFloat4s;
        if (vector < Unit::kVectors) {
            const uint32_t number = share_ * Choice::kShare + group * Unit::kVectors + vector;
            const uint32_t slot = C::part_of_output(lane, part, tile * kTileFloat4s + i, number);
            mem::store_plain(consumer_.here(slot), mem::load_plain(&rows[vector][i]));
        }
        warp().sync();
    }

    PrefillConsumer<S>& consumer_;
    ExpertsArea<S>& area_;
    const uint32_t share_;  // this warp's share of the positions
    // The sums of this warp's row tile and share.
    mem::Line (*const sums_)[Unit::kSumsLines];
    const typename Unit::Lane lane_;
    const uint8_t* const weights_;
    const uint32_t num_items_;
};

// Returns what the experts give a position in one of this rank's lanes, for float4 `index4` of the
// residual, as it is sent to all ranks: the sum of the parts of the columns, in order.
template <class S>
KCCL_DECODE typename ChunkLayout<S>::Sent::Type output_of_lane(PrefillConsumer<S>& consumer,
                                                               uint32_t lane, uint32_t index4,
                                                               uint32_t number) {
    using C = ChunkLayout<S>;
    Float4 parts[S::kWarps];
    KCCL_UNROLL
    for (uint32_t part = 0; part < S::kWarps; ++part) {
        const uint32_t slot = C::part_of_output(lane, part, index4, number);
        parts[part] = mem::load_plain(consumer.here(slot));
    }
    Float4 total = {};
    for (const Float4& part : parts) {
        KCCL_UNROLL
        for (int j = 0; j < 4; ++j) total.value[j] += part.value[j];
    }
    return C::Sent::pack(as_message<S>(total));
}

// Returns where a rank receives float4 `index4` of what the experts give position `number` in a
// lane of all ranks.
template <class S>
KCCL_DECODE auto* output_at(PrefillConsumer<S>& consumer, int rank, uint32_t lane, uint32_t index4,
                            uint32_t number) {
    using C = ChunkLayout<S>;
    using Type = typename C::Sent::Type;
    return reinterpret_cast<Type*>(consumer.in_exchange_buffer(rank, C::kOutputs)) +
           C::output_at(lane, index4, number);
}

// Sends what the experts give in this rank's lanes, for the block's rows of the residual, to all
// ranks. Called by all consumer warps, when all blocks of the rank have stored their parts.
template <class S>
KCCL_DECODE void send_outputs(PrefillConsumer<S>& consumer) {
    const Cut tiles = Shape<S>::Out::tiles_of(consumer.block_in_group());
    for_each_row(
        consumer, tiles.num, kTileFloat4s, [&](uint32_t tile, uint32_t number, uint32_t i) {
            const uint32_t index4 = (tiles.first + tile) * kTileFloat4s + i;
            for (uint32_t lane = 0; lane < Shape<S>::kLanesHere; ++lane) {
                const auto sent = output_of_lane(consumer, lane, index4, number);
                for (uint32_t k = 1; k <= S::kWorldSize; ++k) {
                    const auto rank = static_cast<int>((consumer.comm().rank + k) % S::kWorldSize);
                    mem::store_plain(
                        output_at(consumer, rank, consumer.first_lane() + lane, index4, number),
                        sent);
                }
            }
        });
}

// Returns the biases of a position's experts for float4 `index4` of the residual, each times its
// expert's share.
template <class S>
KCCL_DECODE Float4 biases_of_position(PrefillConsumer<S>& consumer, uint32_t layer, uint32_t number,
                                      uint32_t index4) {
    using M = typename Shape<S>::ExpertDown;
    const ExpertChoice<S>& choice = experts_area(consumer).choice.of[number];
    Float4 biases = {};
    KCCL_UNROLL
    for (uint32_t place = 0; place < S::kPlaces; ++place) {
        const uint32_t expert = mem::load_plain(&choice.expert[place]);
        const float share = mem::load_plain(&choice.share[place]);
        const uint64_t first = biases_of_expert<M, S>(Product<S>::kExpertDown, layer, expert);
        const Float4 bias = load_float4(consumer.task().biases, first + index4);
        KCCL_UNROLL
        for (int j = 0; j < 4; ++j) biases.value[j] += rounded_product(share, bias.value[j]);
    }
    return biases;
}

// Adds what the experts have given, summed over all lanes, to the block's rows of the residual, and
// stages them for the next module. OP: the experts' last op. Called by all consumer warps, when the
// blocks with these rows on all ranks have sent theirs; on one rank, when all blocks have stored
// their parts.
template <uint32_t OP, class S>
KCCL_DECODE void add_outputs(PrefillConsumer<S>& consumer, const PromptChunk& chunk,
                             uint32_t layer) {
    using C = ChunkLayout<S>;
    static_assert(S::kHasBlocking && Shape<S>::kLaneGroups == 1, "all lanes share a residual");
    constexpr auto kNext = next_product<S>(OP + 1);
    const uint32_t module = S::kNumModules * layer + module_of_op<S>(OP);
    const Cut tiles = Shape<S>::Out::tiles_of(consumer.block_in_group());
    for_each_row(
        consumer, tiles.num, kTileFloat4s, [&](uint32_t tile, uint32_t number, uint32_t i) {
            const uint32_t index4 = (tiles.first + tile) * kTileFloat4s + i;
            Float4 total = {};
            KCCL_UNROLL
            for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
                if constexpr (S::kWorldSize == 1) {
                    const auto sent = output_of_lane(consumer, lane, index4, number);
                    add_lane(&total, C::Sent::unpack(sent), lane == 0);
                } else {
                    const auto sent = mem::load_plain(
                        output_at(consumer, consumer.comm().rank, lane, index4, number));
                    add_lane(&total, C::Sent::unpack(sent), lane == 0);
                }
            }
            Float4 x = mem::load_plain(residual_at(consumer, index4, number));
            if constexpr (kHasExpertBiases<S>) {
                if (number < chunk.num) {
                    const Float4 biases = biases_of_position(consumer, layer, number, index4);
                    KCCL_UNROLL
                    for (int j = 0; j < 4; ++j) total.value[j] += biases.value[j];
                }
            }
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) x.value[j] += total.value[j];
            mem::store_plain(residual_at(consumer, index4, number), x);
            stage_normed<kNext>(consumer, norm_of(consumer, module + 1, index4), index4, number, x);
        });
}

}  // namespace kccl::decode
