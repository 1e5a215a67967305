// publish and collect in persistent kernels: an exchange of words among all blocks, and an
// all_reduce in shared memory.
#pragma once

#include "chains.cuh"

namespace in_kernel {

// Must equal _MOST_THREADS of bench/in_kernel/exchange.py.
constexpr int kMostThreads = 544;

// In call k a block publishes the slice that it collected in call k - 1 from the block k positions
// further, with 1 added to every word. So each call takes the slice of another block.
//
// A word is as long as a packet's payload. So each thread publishes the words that it has written
// itself, and the block need not sync in between. For the same reason collect alternates between
// two buffers: a fast thread collects into one while another thread still reads the other.
template <KcclReach REACH, Order ORDER, int WORLD_SIZE>
class Exchange {
  public:
    // memory: shared memory of this block, with room for twice all slices plus one slice.
    // slice: the first slice that this block publishes, `count` words. `first` is added to each.
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
        // collect() also returns a failure of publish().
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

    // Copies all slices that the last call has collected to `out`.
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

// slices: [block][count], the first slices of this rank's blocks. out: [block][slice][count], the
// slices that each block collected last. Dynamic shared memory: twice all slices plus one slice.
template <class Form, Notes NOTES>
KCCL_KERNEL_OF(kMostThreads)
void exchange(KCCL_KERNEL_PARAM(DeviceComm) comm, const uint64_t* slices, uint64_t* out,
              uint32_t count, uint64_t first, uint32_t warmup, uint32_t calls,
              const uint32_t* delays, uint64_t delay_stride, uint64_t* times) {
    const CallCounts counts =
        counts_of_block<NOTES>(warmup, calls, ~0u, delays, delay_stride, times);
    const uint64_t index = kccl::platform::block_in_grid();
    auto* const memory = reinterpret_cast<uint64_t*>(kccl::platform::dynamic_shared());
    Form form(comm, memory, slices + index * count, count, first);
    const Status status = make_calls<NOTES>(counts, [&] { return form.call(); }, [](uint32_t) {});
    if (status == kKcclOk) form.keep_last(out + index * form.num_words());
}

// A message-complete all_reduce: publish, then collect_reduced over the ranks. In each call a block
// collects the next block's slice, reduced over the ranks, and publishes it in the call after.
// Words and buffers are as in Exchange, for the same reasons.
template <class T, int WORLD_SIZE>
class ExchangedSums {
  public:
    using Type = T;
    // memory: shared memory of this block, with room for two slices. slice: the first slice that
    // this block publishes, `count` elements, which must be whole words.
    KCCL_DEVICE ExchangedSums(const DeviceComm& comm, T* memory, const T* slice, uint32_t count,
                              double factor)
        : exchange_(comm),
          count_(kccl::mem::keep(count)),
          mine_(kccl::mem::keep(memory)),
          other_(kccl::mem::keep(memory + count)),
          factor_(factor) {
        const uint32_t next = kccl::platform::block_in_grid() + 1;
        next_ = kccl::mem::keep(next < exchange_.num_blocks() ? next : 0);
        copy(mine_, slice);
    }

    KCCL_DEVICE Status call() {
        kccl::publish<Order::kRelaxed>(exchange_, static_cast<const T*>(mine_), count_);
        // collect_reduced() also returns a failure of publish().
        const Status sums = kccl::collect_reduced<kccl::Sum, Order::kRelaxed>(
            exchange_, other_, count_, kccl::Slices{next_, 1});
        T* const before = mine_;
        mine_ = other_;
        other_ = before;
        return sums;
    }

    KCCL_DEVICE void between(uint32_t) { multiply(mine_, count_, factor_); }

    // Copies the slice that the last call has collected to `out`.
    KCCL_DEVICE void keep_last(T* out) const { copy(out, mine_); }

    KCCL_DEVICE uint32_t count() const { return count_; }

  private:
    KCCL_DEVICE void copy(T* to, const T* from) const {
        auto* const words = reinterpret_cast<uint64_t*>(to);
        for (uint32_t i = exchange_.thread(); i < count_ / kccl::kUnitElements<T>;
             i += exchange_.num_threads()) {
            kccl::mem::store_plain(
                words + i, kccl::mem::load_plain(reinterpret_cast<const uint64_t*>(from) + i));
        }
    }

    kccl::GridExchange<kKcclReachAllRanks, WORLD_SIZE> exchange_;
    const uint32_t count_;  // of a slice
    T* mine_;
    T* other_;
    uint32_t next_;
    const double factor_;
};

// message, out: [block][count], the slices of this rank's blocks. Dynamic shared memory: two
// slices.
template <class Form, Notes NOTES>
KCCL_KERNEL_OF(kMostThreads)
void exchanged_sums(KCCL_KERNEL_PARAM(DeviceComm) comm, const typename Form::Type* message,
                    typename Form::Type* out, uint32_t count, double factor, uint32_t warmup,
                    uint32_t calls, uint32_t period, const uint32_t* delays, uint64_t delay_stride,
                    uint64_t* times) {
    const CallCounts counts =
        counts_of_block<NOTES>(warmup, calls, period, delays, delay_stride, times);
    const uint64_t index = kccl::platform::block_in_grid();
    auto* const memory = reinterpret_cast<typename Form::Type*>(kccl::platform::dynamic_shared());
    Form form(comm, memory, message + index * count, count, factor);
    const Status status = make_calls<NOTES>(
        counts, [&] { return form.call(); }, [&](uint32_t k) { form.between(k); });
    if (status == kKcclOk) form.keep_last(out + index * form.count());
}

}  // namespace in_kernel
