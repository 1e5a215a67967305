// The kernels of `kccl bench <collective> --in-kernel`: calls inside persistent kernels. The
// classes of a collective are in its own file.
//
// Each block opens its channel once. It makes `warmup` untimed calls, then `calls` timed calls. The
// input of a call is the output of the call before, so that a missing or overtaken call makes the
// result wrong. data.py computes the expected result. Sums would grow out of range. So a block
// multiplies its data by `factor` once in `period` calls, which are 30 to 100. In all_reduce each
// rank has another factor. The data of a broadcast change only at a multiplication, and the data
// that reduce_scatter sends do not change at all. Untimed launches with short periods change both,
// so that a stale word is noticed (of a broadcast, on the next root).
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

// The shortest period of a timed launch. A launch with a shorter period is untimed.
constexpr uint32_t kShortestTimed = 8;

enum class Notes { kMean, kEach, kSkewed };

struct CallCounts {
    uint32_t warmup;
    uint32_t calls;
    uint32_t period;
    const uint32_t* delays;  // of this block: nanoseconds before timed call i, for kSkewed
    uint64_t* times;
};

// Delays all threads of this block by delay_ns.
KCCL_DEVICE void pause(uint32_t delay_ns) {
    if (leads(block())) {
        const uint64_t begin = kccl::mem::clock_ns();
        while (kccl::mem::clock_ns() - begin < delay_ns) kccl::mem::poll_pause();
    }
    block().sync();
}

// Makes all calls by call(), which returns a Status. Calls between(k) before call k if a period has
// ended. Returns the first Status that is not kKcclOk.
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
        // Ends the launch early. The host learns the cause from the communicator.
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

// Makes the delays of all participants in a kSkewed launch, one after another and without calls.
// The host subtracts this time from that of the kSkewed launch.
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
    uint64_t shifts;  // see all_gather.cuh
    uint32_t period;

    KCCL_DEVICE uint64_t first() const { return kccl::platform::block_in_grid() * each; }
    KCCL_DEVICE uint64_t length(uint64_t begin) const {
        return count - begin < each ? count - begin : each;
    }
};

// Multiplies `count` elements. All threads of the block must call it. Afterwards each thread may
// send elements that another thread has written.
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
// A barrier has no result. So each launch ends with `checked` barriers, which are checked and not
// timed. A board is an array with a word for each participant, in a cache line of its own. The
// blocks of a GPU share one board; in a barrier of ranks each rank has its own. Before a checked
// barrier each participant writes the barrier's number to its word on every board, and one
// participant is late. After the barrier no participant may find an older number on its own board.
// If the barrier itself orders no memory, the check uses fences.

constexpr uint32_t kWordsOfLine = kKcclLineBytes / sizeof(uint32_t);

// Makes a checked barrier. Returns the number of participants whose word this thread found to be
// older than `number`, or 1 if the barrier failed.
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

// Makes warm-up, timed and checked barriers. Stores in `late`, for each thread of the kernel, how
// many old words it found in the `checked` barriers. The first of these has number `number` + 1.
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
