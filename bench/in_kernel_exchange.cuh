// publish and collect in persistent kernels: words that all blocks pass round, and sums that all have, in
// shared memory.
#pragma once

#include "in_kernel.cuh"

namespace in_kernel {

// _MOST_THREADS of in_kernel_exchange.py.
constexpr int kMostThreads = 544;

// In call k a block publishes the slice that it collected in call k - 1 of the block k further on,
// one more in every word. So whose slice it takes changes from call to call.
//
// Words are as long as a packet's payload: the thread that publishes one is the one that wrote it,
// so that no sync of the block has to stand between. For the same reason there are two places to
// collect to: a thread that is quick collects while another still reads what came before.
template <KcclReach REACH, Order ORDER, int WORLD_SIZE>
class Exchange {
  public:
    // memory: this block's, twice all slices and one. slice: this block's first, `count` words,
    // to each of which `first` is added.
    KCCL_DEVICE Exchange(const DeviceComm& comm, uint64_t* memory, const uint64_t* slice,
                         uint32_t count, uint64_t first)
        : exchange_(comm),
          count_(kccl::mem::keep(count)),
          num_words_(kccl::mem::keep(exchange_.num_slices() * count)),
          to_(kccl::mem::keep(memory)),
          other_(kccl::mem::keep(memory + num_words_)),
          mine_(kccl::mem::keep(memory + 2 * uint64_t{num_words_})) {
        const uint32_t rank = REACH == kKcclReachRank ? 0 : comm.rank;
        next_ = rank * kccl::platform::blocks_per_grid() + kccl::platform::block_in_grid();
        for (uint32_t i = exchange_.thread(); i < count; i += exchange_.num_threads()) {
            kccl::mem::store_plain(mine_ + i, kccl::mem::load_plain(slice + i) + first);
        }
    }

    KCCL_DEVICE Status call() {
        kccl::publish<ORDER>(exchange_, mine_, count_);
        // Its status is also that of publish().
        const Status status = kccl::collect<ORDER>(exchange_, to_, count_);
        next_ = next_ + 1 < exchange_.num_slices() ? next_ + 1 : 0;
        const uint64_t* const from = to_ + uint64_t{next_} * count_;
        for (uint32_t i = exchange_.thread(); i < count_; i += exchange_.num_threads()) {
            kccl::mem::store_plain(mine_ + i, kccl::mem::load_plain(from + i) + 1);
        }
        uint64_t* const before = to_;
        to_ = other_;
        other_ = before;
        return status;
    }

    // What the last call has collected, all slices.
    KCCL_DEVICE void keep_last(uint64_t* out) const {
        for (uint32_t i = exchange_.thread(); i < num_words_; i += exchange_.num_threads()) {
            kccl::mem::store_plain(out + i, kccl::mem::load_plain(other_ + i));
        }
    }

    KCCL_DEVICE uint32_t num_words() const { return num_words_; }

  private:
    kccl::GridExchange<REACH, WORLD_SIZE> exchange_;
    const uint32_t count_;      // of a slice
    const uint32_t num_words_;  // of all slices
    uint64_t* to_;
    uint64_t* other_;
    uint64_t* const mine_;
    uint32_t next_;
};

// slices: of this rank's blocks, [block][count]. out: [block][slice][count], of this rank's blocks.
// Dynamic shared memory: twice all slices, and one.
template <class Form, Notes NOTES>
KCCL_KERNEL_OF(kMostThreads)
void exchange(KCCL_KERNEL_PARAM(DeviceComm) comm, const uint64_t* slices, uint64_t* out,
              uint32_t count, uint64_t first, uint32_t warmup, uint32_t calls,
              const uint32_t* delays, uint64_t delay_stride, uint64_t* times) {
    const Rounds rounds = rounds_of_block<NOTES>(warmup, calls, ~0u, delays, delay_stride, times);
    const uint64_t index = kccl::platform::block_in_grid();
    auto* const memory = reinterpret_cast<uint64_t*>(kccl::platform::dynamic_shared());
    Form form(comm, memory, slices + index * count, count, first);
    const Status status = make_calls<NOTES>(rounds, [&] { return form.call(); }, [](uint32_t) {});
    if (status == kKcclOk) form.keep_last(out + index * form.num_words());
}

// An all_reduce that is complete in every block: publish, and collect what is reduced over the ranks. In
// call k a block contributes the slice of the message that the next block contributed in call k - 1.
// Why words: as in Exchange.
template <class T, int WORLD_SIZE>
class ExchangedSums {
  public:
    using Type = T;
    // memory: this block's, twice the message and a slice. slice: this block's first, `count` elements,
    // which are whole words.
    KCCL_DEVICE ExchangedSums(const DeviceComm& comm, uint64_t* memory, const T* slice,
                              uint32_t count, double factor)
        : exchange_(comm),
          count_(kccl::mem::keep(count)),
          num_words_(kccl::mem::keep(count / kccl::kPayloadElements<T>)),
          all_words_(kccl::mem::keep(exchange_.num_blocks() * num_words_)),
          to_(kccl::mem::keep(memory)),
          other_(kccl::mem::keep(memory + all_words_)),
          mine_(kccl::mem::keep(memory + 2 * uint64_t{all_words_})),
          factor_(factor) {
        const uint32_t next = kccl::platform::block_in_grid() + 1;
        next_ = next < exchange_.num_blocks() ? next * num_words_ : 0;
        const auto* const words = reinterpret_cast<const uint64_t*>(slice);
        for (uint32_t i = exchange_.thread(); i < num_words_; i += exchange_.num_threads()) {
            kccl::mem::store_plain(mine_ + i, kccl::mem::load_plain(words + i));
        }
    }

    KCCL_DEVICE Status call() {
        kccl::publish<Order::kRelaxed>(exchange_, reinterpret_cast<const T*>(mine_), count_);
        const Status sums = kccl::collect_reduced<kccl::Sum, Order::kRelaxed>(
            exchange_, reinterpret_cast<T*>(to_), count_);
        const uint64_t* const from = to_ + next_;
        for (uint32_t i = exchange_.thread(); i < num_words_; i += exchange_.num_threads()) {
            kccl::mem::store_plain(mine_ + i, kccl::mem::load_plain(from + i));
        }
        uint64_t* const before = to_;
        to_ = other_;
        other_ = before;
        return sums;
    }

    KCCL_DEVICE void between(uint32_t) {
        block().sync();
        multiply(reinterpret_cast<T*>(mine_), count_, factor_);
    }

    // The message as the last call left it.
    KCCL_DEVICE void keep_last(uint64_t* out) const {
        for (uint32_t i = exchange_.thread(); i < all_words_; i += exchange_.num_threads()) {
            kccl::mem::store_plain(out + i, kccl::mem::load_plain(other_ + i));
        }
    }

    KCCL_DEVICE uint32_t num_words() const { return all_words_; }

  private:
    kccl::GridExchange<kKcclReachAllRanks, WORLD_SIZE> exchange_;
    const uint32_t count_;      // of a slice
    const uint32_t num_words_;  // of a slice
    const uint32_t all_words_;
    uint64_t* to_;
    uint64_t* other_;
    uint64_t* const mine_;
    uint32_t next_;
    const double factor_;
};

// message: [block][count], this rank's. out: [block][block][count]. Dynamic shared memory: twice the
// message, and a slice.
template <class Form, Notes NOTES>
KCCL_KERNEL_OF(kMostThreads)
void exchanged_sums(KCCL_KERNEL_PARAM(DeviceComm) comm, const typename Form::Type* message,
                    uint64_t* out, uint32_t count, double factor, uint32_t warmup, uint32_t calls,
                    uint32_t period, const uint32_t* delays, uint64_t delay_stride,
                    uint64_t* times) {
    const Rounds rounds =
        rounds_of_block<NOTES>(warmup, calls, period, delays, delay_stride, times);
    const uint64_t index = kccl::platform::block_in_grid();
    auto* const memory = reinterpret_cast<uint64_t*>(kccl::platform::dynamic_shared());
    Form form(comm, memory, message + index * count, count, factor);
    const Status status = make_calls<NOTES>(
        rounds, [&] { return form.call(); }, [&](uint32_t k) { form.between(k); });
    if (status == kKcclOk) form.keep_last(out + index * form.num_words());
}

}  // namespace in_kernel
