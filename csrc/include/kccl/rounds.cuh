// Messages of any length, pushed through the staging in rounds. The steps of a call overlap: while
// the links carry one round, the SMs read the round before.
//
//     step 0        ..., then the flag "written" to all ranks and from all ranks
//     step 1        ..., then "written" again
//       ...
//     step n        what is left to read
//
// Each step but the last is a call of its own on the channel. A step writes into the peers'
// staging, to the slots of its call's parity. The next step reads these slots in this rank's
// staging, after "written" has come from all ranks. By "written" a peer also says that it has read
// what it received in the step before. So the next step may write to the slots of that step again.
//
// The staging holds plain data, which only these flags order. When a kernel begins, peers may still
// read what an earlier kernel wrote into the result half of their staging. Packet calls in between
// do not order those reads, and after an odd number of such calls the parity is the same again. So
// step 0 must not write the result half. After the first "written" of all ranks nobody reads the
// old data in it. Step 0 may write the input half: a rank that has read it says "written" once more
// before its kernel ends, so all peers know that it has been read.
#pragma once

#include "channel.cuh"

namespace kccl {

// The most threads of a block. With more, the lines that a thread loads at once would not fit its
// registers.
constexpr int kMostStepThreads = 512;

// A message of `count` elements, divided into rounds of `most` elements. The last round may be
// shorter.
struct Rounds {
    uint64_t count;
    uint32_t most;

    KCCL_DEVICE uint32_t number() const { return static_cast<uint32_t>((count + most - 1) / most); }
    KCCL_DEVICE uint64_t begin_of(uint32_t round) const { return uint64_t{round} * most; }
    KCCL_DEVICE uint32_t count_of(uint32_t round) const {
        const uint64_t rest = count - begin_of(round);
        return rest < most ? static_cast<uint32_t>(rest) : most;
    }
};

// An array of `count` elements of T, divided into `number` chunks, each of which begins on a line.
template <class T>
struct Chunks {
    uint32_t count;
    uint32_t each;

    KCCL_DEVICE Chunks(uint32_t count, uint32_t number) : count(count) {
        constexpr uint32_t kLine = kKcclLineBytes / sizeof(T);
        each = (count + number * kLine - 1) / (number * kLine) * kLine;
    }
    KCCL_DEVICE uint32_t begin_of(uint32_t chunk) const {
        return chunk * each < count ? chunk * each : count;
    }
    KCCL_DEVICE uint32_t count_of(uint32_t chunk) const {
        return begin_of(chunk + 1) - begin_of(chunk);
    }
};

// One of the rows that copy_rows() copies.
struct Row {
    uint8_t* to;
    const uint8_t* from;
    uint32_t num_bytes;

    template <class T>
    KCCL_DEVICE static Row of(T* to, const T* from, uint32_t count) {
        return {reinterpret_cast<uint8_t*>(to), reinterpret_cast<const uint8_t*>(from),
                static_cast<uint32_t>(count * sizeof(T))};
    }
};

// Copies this thread's share of num_rows rows, which do not overlap; it is thread `index` of
// `size`. It loads from several rows at once, because a loop over single rows would wait for the
// loads of each row separately. row_of(k) -> Row. WORLD_SIZE: more than num_rows; 0 for any number.
template <int WORLD_SIZE, class RowOf>
KCCL_DEVICE void copy_rows(uint32_t index, uint32_t size, int num_rows, RowOf row_of) {
    constexpr int kRows = WORLD_SIZE > 1 && WORLD_SIZE < 5 ? WORLD_SIZE - 1 : 4;
    constexpr uint32_t kAtOnce = kRows < 3 ? 8 / kRows : 2;
    for (int first = 0; first < num_rows; first += kRows) {
        Row rows[kRows] = {};
        uint32_t most = 0;
        uint64_t addresses = 0;
        KCCL_UNROLL
        for (int k = 0; k < kRows; ++k) {
            if (first + k >= num_rows) break;
            rows[k] = row_of(first + k);
            if (rows[k].num_bytes > most) most = rows[k].num_bytes;
            addresses |= reinterpret_cast<uint64_t>(rows[k].to);
            addresses |= reinterpret_cast<uint64_t>(rows[k].from) | rows[k].num_bytes;
        }
        if (platform::kCpu || addresses % sizeof(mem::Line) != 0) {
            for (int k = first; k < num_rows && k < first + kRows; ++k) {
                const Row row = row_of(k);
                mem::copy(row.to, row.from, row.num_bytes, index, size);
            }
            continue;
        }
        for (uint32_t line = index; line < most / sizeof(mem::Line); line += kAtOnce * size) {
            mem::Line lines[kAtOnce][kRows];
            const auto at = [&](uint32_t n) { return (line + n * size) * sizeof(mem::Line); };
            KCCL_UNROLL
            for (uint32_t n = 0; n < kAtOnce; ++n) {
                KCCL_UNROLL
                for (int k = 0; k < kRows; ++k) {
                    if (at(n) >= rows[k].num_bytes) continue;
                    lines[n][k] =
                        mem::load_plain(reinterpret_cast<const mem::Line*>(rows[k].from + at(n)));
                }
            }
            KCCL_UNROLL
            for (uint32_t n = 0; n < kAtOnce; ++n) {
                KCCL_UNROLL
                for (int k = 0; k < kRows; ++k) {
                    if (at(n) >= rows[k].num_bytes) continue;
                    mem::store_plain(reinterpret_cast<mem::Line*>(rows[k].to + at(n)), lines[n][k]);
                }
            }
        }
    }
}

// Makes num_calls pairwise calls, at least 1, in num_calls + 1 steps. step(s, parity) -> void makes
// step s. `parity`: that of the slots that were written in step s - 1, and which step s reads.
// Called by all threads of the channel's coop (a thread, warp or block: coop.cuh), with the same
// num_calls on every rank.
template <class Coop, int WORLD_SIZE, class Step>
KCCL_DEVICE Status in_steps(Channel<Coop, WORLD_SIZE>& channel, KcclKernel kernel,
                            uint32_t num_calls, Step step) {
    uint32_t parity = 0;
    for (uint32_t s = 0;; ++s) {
        if (s < num_calls) {
            const Status entered = channel.next(kernel, Exchange::kPairwise);
            if (entered != kKcclOk) return entered;
        }
        step(s, parity);
        if (s == num_calls) return channel.leave();
        channel.template arrive<mem::Order::kRelease>(kKcclFlagWritten);
        const Status written = channel.template await<mem::Order::kAcquire>(kKcclFlagWritten);
        if (written != kKcclOk) return written;
        parity = channel.parity();
    }
}

}  // namespace kccl
