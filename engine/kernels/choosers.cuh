// Who chooses a token together (sample.cuh), and how they exchange what they have found.
//
// Without seats, a token is chosen by all consumer warps of all blocks. With seats (seats.cuh), it
// is chosen by one consumer warp of each block, and the other warps choose tokens of other requests
// at the same time. Each column then has exchanges of its own: its slots and its number. Within a
// choice the same thread reads a slot each time, as exchange_buffer.cuh asks for. Between two
// choices another thread may: the fences at a token step's end order them. Both give the same
// tokens, because sums of weights are exact, and the better one of two candidates does not depend
// on the order of comparisons.
#pragma once

#include "candidates.cuh"
#include "mask.cuh"

namespace kccl::decode {

// Used where all consumer warps choose. Each of their threads makes an object, and all of them call
// each function together.
template <class S>
class AllWarps {
  public:
    static constexpr uint32_t kThreads = Shape<S>::kConsumerThreads;

    KCCL_DECODE AllWarps(ConsumerWarp<S>& consumer, uint32_t)
        : consumer_(consumer), exchange_(mem::load_plain(&consumer.shared().exchanges)) {}

    // Returns this thread's number among the block's choosers.
    KCCL_DECODE uint32_t thread() const {
        return consumer_.warp_index() * platform::kWarpSize + consumer_.thread();
    }
    KCCL_DECODE bool is_first_warp() const { return consumer_.warp_index() == 0; }
    // Tells whether this thread is the first of the block's choosers.
    KCCL_DECODE bool lead() const { return is_first_warp() && leads(warp()); }

    // Tells that this choice reads only control words whose kind is less than `end`.
    KCCL_DECODE void read_before(uint32_t) {}

    // Copies the mask of a request, if it has one, for allowed(). Returns false if a wait failed.
    KCCL_DECODE bool fetch_mask(const Task& task) {
        if (task.mask == 0) return true;
        copy_mask(consumer_, task, consumer_.shared().masks[0], thread(), kThreads);
        return consumer_.meet();
    }
    // Returns which ids of a float4 of logits may be chosen: see allowed_of().
    KCCL_DECODE uint32_t allowed(const Task& task, uint32_t first_id) const {
        return allowed_of(consumer_, task, consumer_.shared().masks[0], first_id);
    }

    // Combines the threads' control words of the kinds from `first` on for the next exchange.
    template <uint32_t N>
    KCCL_DECODE void store(ControlWordKind first, ControlWord (&control_words)[N]) {
        combine_in_warp(first, control_words);
        if (!leads(warp())) return;
        KCCL_UNROLL
        for (uint32_t i = 0; i < N; ++i) {
            mem::store_plain(&consumer_.shared().control_words[consumer_.warp_index()][first + i],
                             control_words[i]);
        }
    }

    // Stores a control word of the block for the next exchange. Warp 0 stores the word that it
    // passes, the other warps store zeros, which add nothing. The control words of other kinds mean
    // nothing in this exchange.
    KCCL_DECODE void leave(ControlWordKind kind, const ControlWord& control) {
        if (!leads(warp())) return;
        mem::store_plain(&consumer_.shared().control_words[consumer_.warp_index()][kind],
                         consumer_.warp_index() == 0 ? control : ControlWord{});
    }

    // Combines what the choosers of all blocks of all ranks have stored as control words. found()
    // then returns the results. Returns false if a wait failed.
    KCCL_DECODE bool exchange() {
        if (!consumer_.meet()) return false;
        send();
        return receive();
    }

    KCCL_DECODE ControlWord found(ControlWordKind kind) const {
        return mem::load_plain(&consumer_.shared().found[kind]);
    }

  private:
    // Sends this block's results to all blocks of all ranks. All warps have met since they computed
    // them.
    KCCL_DECODE void send() {
        Shared<S>& shared = consumer_.shared();
#pragma unroll 1
        for (uint32_t kind = consumer_.warp_index(); kind < kNumControlWords; kind += S::kWarps) {
            const uint32_t from = consumer_.thread();
            ControlWord control[1] = {};
            if (from < S::kWarps) control[0] = mem::load_plain(&shared.control_words[from][kind]);
            combine_in_warp(kind, control);
            if (!leads(warp())) continue;
            const uint32_t mine = consumer_.comm().rank * S::kBlocks + consumer_.block();
            consumer_.publish_to_all(Slots<S>::control_word(exchange_, kind) + mine,
                                     float4_of(control[0]), tag_of_end(exchange_));
        }
        if (consumer_.warp_index() == 0 && leads(warp())) {
            mem::store_plain(&shared.exchanges, exchange_ + 1);
        }
    }

    // Waits for the control words of all blocks, and leaves their combination in shared memory.
    // Returns false if a wait failed.
    KCCL_DECODE bool receive() {
        constexpr uint32_t kBlocks = S::kWorldSize * S::kBlocks;
        constexpr uint32_t kEach = ceil_div(kBlocks, platform::kWarpSize);
        constexpr uint32_t kAtOnce = kEach < 2 ? kEach : 2;
#pragma unroll 1
        for (uint32_t kind = consumer_.warp_index(); kind < kNumControlWords; kind += S::kWarps) {
            ControlWord all[1] = {};
#pragma unroll 1
            for (uint32_t first = 0; first < kBlocks; first += kAtOnce * platform::kWarpSize) {
                uint32_t slots[kAtOnce], wanted = 0;
                Float4 float4s[kAtOnce];
                KCCL_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    const uint32_t from = first + i * platform::kWarpSize + consumer_.thread();
                    wanted |= from < kBlocks ? 1u << i : 0;
                    slots[i] =
                        Slots<S>::control_word(exchange_, kind) + (from < kBlocks ? from : 0);
                }
                consumer_.template await<ConsumerWarp<S>::kReach>(
                    slots, wanted, tag_of_end(exchange_), float4s, (1u << S::kWorldSize) - 1);
                KCCL_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    if ((wanted >> i & 1u) != 0)
                        all[0] = combined(kind, all[0], control_word_of(float4s[i]));
                }
            }
            combine_in_warp(kind, all);
            if (leads(warp())) mem::store_plain(&consumer_.shared().found[kind], all[0]);
        }
        ++exchange_;
        return consumer_.meet();
    }

    ConsumerWarp<S>& consumer_;
    uint32_t exchange_;
};

// Used with seats, where one warp of each block chooses. It has the functions of AllWarps.
template <class S>
class OneWarp {
  public:
    static constexpr uint32_t kThreads = platform::kWarpSize;

    KCCL_DECODE OneWarp(ConsumerWarp<S>& consumer, uint32_t column)
        : consumer_(consumer),
          column_(column),
          exchange_(mem::load_plain(&consumer.shared().exchanges_of[column])) {}

    KCCL_DECODE uint32_t thread() const { return consumer_.thread(); }
    KCCL_DECODE bool is_first_warp() const { return true; }
    KCCL_DECODE bool lead() const { return leads(warp()); }

    // An exchange sends all kinds of control words, but reads only some. A choice always reads the
    // same ones, and the end of a token step orders those of the choice before.
    KCCL_DECODE void read_before(uint32_t end) { num_kinds_ = end; }

    KCCL_DECODE bool fetch_mask(const Task& task) {
        if (task.mask == 0) return true;
        // Other threads may still read the mask of the request before.
        warp().sync();
        copy_mask(consumer_, task, mask(), thread(), kThreads);
        warp().sync();
        return true;
    }
    KCCL_DECODE uint32_t allowed(const Task& task, uint32_t first_id) const {
        return allowed_of(consumer_, task, mask(), first_id);
    }

    template <uint32_t N>
    KCCL_DECODE void store(ControlWordKind first, ControlWord (&control_words)[N]) {
        combine_in_warp(first, control_words);
        // Other threads may still read the results of the last exchange, which lie here.
        warp().sync();
        if (!lead()) return;
        KCCL_UNROLL
        for (uint32_t i = 0; i < N; ++i) mem::store_plain(word_at(first + i), control_words[i]);
    }
    KCCL_DECODE void leave(ControlWordKind kind, const ControlWord& control) {
        warp().sync();
        if (lead()) mem::store_plain(word_at(kind), control);
    }

    KCCL_DECODE bool exchange() {
        constexpr uint32_t kAtOnce = least_of(ceil_div(kBlocks, kLeastSharers), kMostAtOnce);
        const uint32_t tag = tag_of_end(exchange_);
        warp().sync();
        if (thread() < kNumControlWords) {
            const uint32_t mine = consumer_.comm().rank * S::kBlocks + consumer_.block();
            const ControlWord control = mem::load_plain(word_at(thread()));
            consumer_.publish_to_all(Slots<S>::seat_word(column_, exchange_, thread()) + mine,
                                     float4_of(control), tag);
        }
        // How many neighbouring threads read the control words of one kind.
        const uint32_t sharers = platform::kWarpSize / num_kinds_;
        const uint32_t kind = thread() / sharers, sharer = thread() % sharers;
        const bool has_kind = kind < num_kinds_;
        const uint32_t first = Slots<S>::seat_word(column_, exchange_, has_kind ? kind : 0);
        ControlWord all = {};
#pragma unroll 1
        for (uint32_t begin = sharer; begin - sharer < kBlocks; begin += kAtOnce * sharers) {
            uint32_t slots[kAtOnce], wanted = 0;
            Float4 float4s[kAtOnce];
            KCCL_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                const uint32_t from = begin + i * sharers;
                const bool is_there = has_kind && from < kBlocks;
                wanted |= is_there ? 1u << i : 0;
                slots[i] = first + (is_there ? from : 0);
            }
            consumer_.template await<ConsumerWarp<S>::kReach>(
                slots, wanted, tag, float4s, (1u << S::kWorldSize) - 1, begin == sharer);
            KCCL_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                if ((wanted >> i & 1u) != 0) {
                    all = combined(kind, all, control_word_of(float4s[i]));
                }
            }
        }
        // Only the first of the threads that share a kind gets the combination of all their words.
        const ControlWord own = all;
#pragma unroll 1
        for (uint32_t i = 1; i < sharers; ++i) {
            const uint32_t other = (warp().index() + i) % platform::kWarpSize;
            all = combined(kind, all, platform::shuffle(own, other));
        }
        // Other threads may still read the block's own words, which lie where the results go.
        warp().sync();
        if (has_kind && sharer == 0) mem::store_plain(word_at(kind), all);
        exchange_ = (exchange_ + 1) % 4;
        if (lead()) mem::store_plain(&consumer_.shared().exchanges_of[column_], exchange_);
        warp().sync();
        return !consumer_.failed();
    }

    KCCL_DECODE ControlWord found(ControlWordKind kind) const {
        return mem::load_plain(word_at(kind));
    }

  private:
    static constexpr uint32_t kBlocks = S::kWorldSize * S::kBlocks;
    static constexpr uint32_t kLeastSharers = platform::kWarpSize / kNumControlWords;
    // The most control words for which a thread waits at the same time.
    static constexpr uint32_t kMostAtOnce = 6;

    KCCL_DECODE ControlWord* word_at(uint32_t kind) const {
        return &consumer_.shared().control_words[consumer_.warp_index()][kind];
    }
    KCCL_DECODE uint32_t* mask() const { return consumer_.shared().masks[consumer_.warp_index()]; }

    ConsumerWarp<S>& consumer_;
    const uint32_t column_;
    uint32_t exchange_;  // modulo 4, because slots and tags repeat every four exchanges
    uint32_t num_kinds_ = kNumControlWords;
};

// Returns where a block keeps its numbers of the columns' exchanges between two rounds: one word,
// with two bits for each column, because slots and tags repeat every four exchanges.
template <class S>
KCCL_DECODE uint32_t* seat_exchanges_at(const DeviceComm& comm, const Task& task) {
    const uint64_t slot = Slots<S>::kSeatCounts + platform::block_in_grid();
    return reinterpret_cast<uint32_t*>(task.exchange_buffers[comm.rank] + slot * sizeof(Float4));
}

// load_seat_exchanges() copies these numbers into shared memory at the beginning of a round.
// store_seat_exchanges() writes them back at its end. Both are called by the block's first thread.
template <class S>
KCCL_DECODE void load_seat_exchanges(const DeviceComm& comm, const Task& task, Shared<S>& shared) {
    const uint32_t counts = mem::load_plain(seat_exchanges_at<S>(comm, task));
    for (uint32_t i = 0; i < S::kColumns; ++i) {
        mem::store_plain(&shared.exchanges_of[i], counts >> 2 * i & 3u);
    }
}
template <class S>
KCCL_DECODE void store_seat_exchanges(ConsumerWarp<S>& consumer) {
    uint32_t counts = 0;
    for (uint32_t i = 0; i < S::kColumns; ++i) {
        counts |= mem::load_plain(&consumer.shared().exchanges_of[i]) << 2 * i;
    }
    mem::store_plain(seat_exchanges_at<S>(consumer.comm(), consumer.task()), counts);
}

}  // namespace kccl::decode
