// The kernels of `kccl bench <collective> --in-kernel`: calls inside persistent kernels.
//
// Each block opens its channel once. It makes `warmup` untimed calls, then `calls` timed calls. The
// input of a call is the output of the call before, so that a missing or overtaken call makes the
// result wrong; data.py computes the expected result. Sums would grow out of range. So every
// `period` calls a block multiplies data by `factor`; in all_reduce each rank has another factor.
// This is one pass in 30 to 100 calls. A broadcast's data change only then; what reduce_scatter
// sends does not change at all. Untimed launches with short periods change both, so a stale word
// shows (of a broadcast, on the next root).
//
// The clock is the GPU's own, read inside the kernel: no time includes a launch or the host. A
// launch records times of one kind only, so that one kind does not disturb another:
//
//   kMean     times[block]: nanoseconds of all timed calls
//   kEach     times[block * (calls + 1) + i]: when call i begins; the last one, when all have ended
//   kSkewed   as kMean, with a delay of delays[block * delay_stride + i] ns before timed call i
#pragma once

#include <kccl/kccl.cuh>

namespace in_kernel {

using kccl::Block;
using kccl::block;
using kccl::DeviceComm;
using kccl::Status;
using kccl::mem::Order;
using kccl::mem::Scope;

// Untimed launches have shorter periods.
constexpr uint32_t kShortestTimed = 8;

enum class Notes { kMean, kEach, kSkewed };

struct CallCounts {
    uint32_t warmup;
    uint32_t calls;
    uint32_t period;
    const uint32_t* delays;  // this block's
    uint64_t* times;
};

// Delays this block.
KCCL_DEVICE void pause(uint32_t delay_ns) {
    if (leads(block())) {
        const uint64_t begin = kccl::mem::clock_ns();
        while (kccl::mem::clock_ns() - begin < delay_ns) kccl::mem::poll_pause();
    }
    block().sync();
}

// Makes all calls. call() returns a Status; between(k) runs before call k when a period is over.
template <Notes NOTES, class Call, class Between>
KCCL_DEVICE Status make_calls(const CallCounts& counts, Call call, Between between) {
    const uint32_t end = kccl::mem::keep(counts.warmup + counts.calls);
    uint64_t begin = 0;
    uint32_t left = counts.period;
    for (uint32_t k = 0; k < end; ++k) {
        if (left == 0) {
            between(k);
            left = counts.period;
        }
        --left;
        if (k == counts.warmup) begin = kccl::mem::clock_ns();
        if constexpr (NOTES != Notes::kMean) {
            if (k >= counts.warmup) {
                const uint32_t i = k - counts.warmup;
                if constexpr (NOTES == Notes::kSkewed) {
                    pause(kccl::mem::load_plain(counts.delays + i));
                } else if (leads(block())) {
                    kccl::mem::store_plain(counts.times + i, kccl::mem::clock_ns());
                }
            }
        }
        const Status status = call();
        // The communicator reports the cause to the host.
        if (status != kKcclOk) return status;
    }
    const uint64_t now = kccl::mem::clock_ns();
    if (leads(block())) {
        if constexpr (NOTES == Notes::kEach) {
            kccl::mem::store_plain(counts.times + counts.calls, now);
        } else {
            kccl::mem::store_plain(counts.times, now - begin);
        }
    }
    return kKcclOk;
}

template <Notes NOTES>
KCCL_DEVICE CallCounts counts_of_block(uint32_t warmup, uint32_t calls, uint32_t period,
                                       const uint32_t* delays, uint64_t delay_stride,
                                       uint64_t* times) {
    const uint64_t index = kccl::platform::block_in_grid();
    const uint64_t stride = NOTES == Notes::kEach ? uint64_t{calls} + 1 : 1;
    return {warmup, calls, period, delays + index * delay_stride, times + index * stride};
}

// The delays of a kSkewed launch alone: those of all participants, one after another.
KCCL_KERNEL void delays_alone(const uint32_t* delays, uint32_t count, uint64_t* times) {
    const uint64_t begin = kccl::mem::clock_ns();
    for (uint32_t i = 0; i < count; ++i) pause(kccl::mem::load_plain(delays + i));
    if (leads(block())) kccl::mem::store_plain(times, kccl::mem::clock_ns() - begin);
}

// ---- Collectives of data ------------------------------------------------------------------------

// A message, or a chunk of it if the collective has chunks, in slices of `each` elements. Each
// block has one slice. No slice is empty, and the last one may be shorter.
template <class T>
struct Data {
    T* x;
    T* out;
    uint64_t count;
    uint64_t each;
    double factor;
    uint64_t shifts;  // see AllGather
    uint32_t period;

    KCCL_DEVICE uint64_t first() const { return kccl::platform::block_in_grid() * each; }
    KCCL_DEVICE uint64_t length(uint64_t begin) const {
        return count - begin < each ? count - begin : each;
    }
};

// All threads of the block must call it. After it each of them may send what another has written.
template <class T>
KCCL_DEVICE void multiply(T* array, uint64_t count, double factor) {
    using Element = kccl::Element<T>;
    const auto by = static_cast<typename Element::Acc>(factor);
    for (uint64_t i = block().index(); i < count; i += block().size()) {
        const auto value = Element::widen(kccl::mem::load_plain(array + i));
        kccl::mem::store_plain(array + i, Element::narrow(value * by));
    }
    block().sync();
}

// Slice-complete: a block keeps its slice.
template <class T, int WORLD_SIZE>
class AllReduceSlices {
  public:
    using Type = T;
    KCCL_DEVICE AllReduceSlices(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm),
          slice_(kccl::mem::keep(data.x + data.first())),
          count_(kccl::mem::keep(data.length(data.first()))),
          factor_(data.factor) {}
    KCCL_DEVICE Status call() { return kccl::all_reduce<T>(channel_, slice_, slice_, count_); }
    KCCL_DEVICE void between(uint32_t) { multiply(slice_, count_, factor_); }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    T* const slice_;
    const uint64_t count_;
    const double factor_;
};

// Message-complete: in each call a block reduces the slice that another block reduced in the call
// before.
template <class T, int WORLD_SIZE>
class AllReduceMessage {
  public:
    using Type = T;
    KCCL_DEVICE AllReduceMessage(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm), blocks_(comm), data_(data), begin_(data.first()) {}
    KCCL_DEVICE Status call() {
        T* const slice = data_.x + begin_;
        const Status status = kccl::all_reduce<T>(channel_, slice, slice, data_.length(begin_));
        begin_ = begin_ + data_.each < data_.count ? begin_ + data_.each : 0;
        return status != kKcclOk ? status : blocks_.sync();
    }
    KCCL_DEVICE void between(uint32_t) {
        multiply(data_.x + begin_, data_.length(begin_), data_.factor);
    }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    kccl::GridBarrier blocks_;
    const Data<T> data_;
    uint64_t begin_;
};

// In place: a rank's own chunk becomes the sum of all ranks' chunks for it. Once a period that
// chunk changes its sign; in untimed launches the chunks sent to the peers do.
template <class T, int WORLD_SIZE>
class ReduceScatter {
  public:
    using Type = T;
    KCCL_DEVICE ReduceScatter(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm),
          in_(kccl::mem::keep(data.x + data.first())),
          own_(kccl::mem::keep(in_ + comm.rank * data.count)),
          count_(kccl::mem::keep(data.length(data.first()))),
          stride_(kccl::mem::keep(data.count)),
          factor_(data.factor),
          is_timed_(data.period >= kShortestTimed) {}
    KCCL_DEVICE Status call() {
        return kccl::reduce_scatter<T>(channel_, own_, in_, count_, stride_);
    }
    KCCL_DEVICE void between(uint32_t) {
        if (is_timed_) return multiply(own_, count_, factor_);
        for (int peer = 0; peer < channel_.world_size(); ++peer) {
            T* const chunk = in_ + peer * stride_;
            if (chunk != own_) multiply(chunk, count_, factor_);
        }
    }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    T* const in_;
    T* const own_;
    const uint64_t count_;
    const uint64_t stride_;
    const double factor_;
    const bool is_timed_;
};

// Calls go from `x` to `out` and back in turn. In call k each rank sends its own chunk of what it
// received or, if bit k % 64 of `shifts` is set, the next rank's chunk. So the chunks move between
// ranks, and a stale chunk differs from the new one.
template <class T, int WORLD_SIZE>
class AllGather {
  public:
    using Type = T;
    KCCL_DEVICE AllGather(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm),
          from_(kccl::mem::keep(data.x + data.first())),
          to_(kccl::mem::keep(data.out + data.first())),
          own_(kccl::mem::keep(comm.rank * data.count)),
          next_(kccl::mem::keep((comm.rank + 1) % comm.world_size * data.count)),
          count_(kccl::mem::keep(data.length(data.first()))),
          stride_(kccl::mem::keep(data.count)),
          shifts_(kccl::mem::keep(data.shifts)) {}
    KCCL_DEVICE Status call() {
        const T* const chunk = from_ + ((shifts_ & 1) != 0 ? next_ : own_);
        const Status status = kccl::all_gather<T>(channel_, to_, chunk, count_, stride_);
        shifts_ = shifts_ >> 1 | shifts_ << 63;
        T* const before = from_;
        from_ = to_;
        to_ = before;
        return status;
    }
    KCCL_DEVICE void between(uint32_t) {}

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    T* from_;
    T* to_;
    const uint64_t own_;
    const uint64_t next_;
    const uint64_t count_;
    const uint64_t stride_;
    uint64_t shifts_;
};

// The ranks take turns as root, and each sends what it has received. Once a period the next root
// changes the data.
template <class T, int WORLD_SIZE>
class Broadcast {
  public:
    using Type = T;
    KCCL_DEVICE Broadcast(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm),
          slice_(kccl::mem::keep(data.x + data.first())),
          count_(kccl::mem::keep(data.length(data.first()))),
          factor_(data.factor) {}
    KCCL_DEVICE Status call() {
        const int root = root_;
        root_ = root_ + 1 < channel_.world_size() ? root_ + 1 : 0;
        return kccl::broadcast<T>(channel_, slice_, slice_, count_, root);
    }
    KCCL_DEVICE void between(uint32_t) {
        if (channel_.comm().rank == root_) multiply(slice_, count_, factor_);
    }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    T* const slice_;
    const uint64_t count_;
    const double factor_;
    int root_ = 0;
};

template <class Form, Notes NOTES>
KCCL_KERNEL void chain(KCCL_KERNEL_PARAM(DeviceComm) comm, typename Form::Type* x,
                       typename Form::Type* out, uint64_t count, uint64_t each, double factor,
                       uint64_t shifts, uint32_t warmup, uint32_t calls, uint32_t period,
                       const uint32_t* delays, uint64_t delay_stride, uint64_t* times) {
    const CallCounts counts =
        counts_of_block<NOTES>(warmup, calls, period, delays, delay_stride, times);
    Form form(comm, Data<typename Form::Type>{x, out, count, each, factor, shifts, period});
    make_calls<NOTES>(counts, [&] { return form.call(); }, [&](uint32_t k) { form.between(k); });
}

// ---- Barriers -----------------------------------------------------------------------------------
//
// A barrier has no result. So each launch ends with `checked` barriers that are checked, not timed.
// Before a barrier every participant writes the barrier's number to its word on every board; one
// participant is late. After the barrier no participant may find an older number on its own board.
// If the barrier orders no memory, fences do.

constexpr uint32_t kWordsOfLine = kKcclLineBytes / sizeof(uint32_t);

// All ranks, one block each; every rank has a board.
template <Order ORDER, int WORLD_SIZE>
class RankBarrier {
  public:
    static constexpr bool kOrders = ORDER == Order::kAcqRel;
    static constexpr Scope kScope = Scope::kSystem;
    KCCL_DEVICE explicit RankBarrier(const DeviceComm& comm) : channel_(block(), comm) {}
    KCCL_DEVICE Status call() { return kccl::barrier<ORDER>(channel_); }
    KCCL_DEVICE uint32_t participants() const { return channel_.world_size(); }
    KCCL_DEVICE uint32_t own() const { return channel_.comm().rank; }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
};

// All blocks of a GPU, which share a board.
template <Order ORDER>
class GridSync {
  public:
    static constexpr bool kOrders = ORDER == Order::kAcqRel;
    static constexpr Scope kScope = Scope::kDevice;
    KCCL_DEVICE explicit GridSync(const DeviceComm& comm) : barrier_(comm) {}
    KCCL_DEVICE Status call() { return barrier_.template sync<ORDER>(); }
    KCCL_DEVICE uint32_t participants() const { return kccl::platform::blocks_per_grid(); }
    KCCL_DEVICE uint32_t own() const { return kccl::platform::block_in_grid(); }

  private:
    kccl::GridBarrier barrier_;
};

// The number of participants whose word this thread found too old after barrier `number`.
template <class BarrierForm>
KCCL_DEVICE uint32_t checked_barrier(BarrierForm& barrier, uint32_t* const* boards,
                                     uint32_t num_boards, uint32_t own_board, uint32_t number) {
    using kccl::mem::fence;
    const Block coop = block();
    for (uint32_t i = coop.index(); i < num_boards; i += coop.size()) {
        kccl::mem::store<Order::kRelaxed, BarrierForm::kScope>(
            kccl::mem::load_plain(boards + i) + barrier.own() * kWordsOfLine, number);
    }
    if constexpr (!BarrierForm::kOrders) {
        coop.sync();
        fence<Order::kAcqRel, BarrierForm::kScope>();
    }
    if (barrier.call() != kKcclOk) return 1;
    if constexpr (!BarrierForm::kOrders) {
        fence<Order::kAcqRel, BarrierForm::kScope>();
        coop.sync();
    }
    const uint32_t* board = kccl::mem::load_plain(boards + own_board);
    uint32_t late = 0;
    for (uint32_t i = coop.index(); i < barrier.participants(); i += coop.size()) {
        const uint32_t seen =
            kccl::mem::load<Order::kRelaxed, BarrierForm::kScope>(board + i * kWordsOfLine);
        // A fast participant may have written the number of the next barrier.
        if (seen - number > 1) ++late;
    }
    return late;
}

// late: for each thread of the kernel, how many old words it found in the `checked` barriers. The
// first of them has the number `number` + 1.
template <class BarrierForm, Notes NOTES>
KCCL_DEVICE void make_barriers(BarrierForm& barrier, uint32_t warmup, uint32_t calls,
                               uint32_t checked, uint32_t* const* boards, uint32_t num_boards,
                               uint32_t own_board, uint32_t number, const uint32_t* delays,
                               uint64_t delay_stride, uint64_t* times, uint32_t* late) {
    const CallCounts counts =
        counts_of_block<NOTES>(warmup, calls, ~0u, delays, delay_stride, times);
    const Status status =
        make_calls<NOTES>(counts, [&] { return barrier.call(); }, [](uint32_t) {});
    if (status != kKcclOk) return;
    uint32_t found = 0;
    for (uint32_t i = 0; i < checked; ++i) {
        pause(kccl::mem::load_plain(counts.delays + i));
        found += checked_barrier(barrier, boards, num_boards, own_board, number + 1 + i);
    }
    const uint64_t thread =
        uint64_t{kccl::platform::block_in_grid()} * block().size() + block().index();
    kccl::mem::store_plain(late + thread, found);
}

template <class BarrierForm, Notes NOTES>
KCCL_KERNEL void barriers(KCCL_KERNEL_PARAM(DeviceComm) comm, uint32_t warmup, uint32_t calls,
                          uint32_t checked, uint32_t* const* boards, uint32_t num_boards,
                          uint32_t own_board, uint32_t number, const uint32_t* delays,
                          uint64_t delay_stride, uint64_t* times, uint32_t* late) {
    BarrierForm barrier(comm);
    make_barriers<BarrierForm, NOTES>(barrier, warmup, calls, checked, boards, num_boards,
                                      own_board, number, delays, delay_stride, times, late);
}

}  // namespace in_kernel
