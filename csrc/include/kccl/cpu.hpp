// Ranks on CPUs for C++ programs without Python: threads of one program, or the processes that it
// forks. Any C++20 compiler takes it, without CUDA and without a library:
//
//     kccl::cpu::Communicator comm(4, {.channels = 1, .max_bytes = 4096, .timeout_s = 30});
//     comm.run([&](int rank) {  // in a thread for each rank
//         kccl::Channel<kccl::Block> channel(kccl::block(), comm.device_comm(rank));
//         kccl::all_reduce(channel, x[rank], x[rank], count);
//         comm.check(rank);  // throws what went wrong in its calls
//     });
//
// A block is one thread here. Each thread of a rank must use channels of its own. A rank that waits
// yields its core.
#pragma once

#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device_comm.h"
#include "kccl.cuh"
#include "record.hpp"

// Functions that wait.cuh calls on a CPU. They are weak, because several files of a program may
// include this header.
extern "C" {

__attribute__((weak)) uint64_t kccl_host_clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// These two functions fail: only kernels that the library launches read the memory of other
// processes, and there are none here.
__attribute__((weak)) int kccl_host_read_peer(uint64_t, int, void*, uint64_t, uint64_t) {
    return -1;
}
__attribute__((weak)) int kccl_host_may_read_peer(uint64_t, int) { return 0; }

__attribute__((weak)) uint32_t kccl_host_idle(uint64_t, uint64_t, uint32_t, uint32_t*) {
    sched_yield();
    return kKcclOk;
}
}

namespace kccl::cpu {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Memory that the threads of this process and the processes that it forks share; zero at first.
class Memory {
  public:
    explicit Memory(uint64_t num_bytes) : num_bytes_(num_bytes) {
        address_ =
            mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (address_ == MAP_FAILED) {
            throw Error("mmap of " + std::to_string(num_bytes) +
                        " bytes failed: " + std::strerror(errno));
        }
    }
    ~Memory() {
        if (address_ != nullptr) munmap(address_, num_bytes_);
    }
    Memory(Memory&& other) noexcept
        : address_(std::exchange(other.address_, nullptr)), num_bytes_(other.num_bytes_) {}
    Memory& operator=(Memory&&) = delete;
    uint64_t address() const { return reinterpret_cast<uint64_t>(address_); }
    uint64_t num_bytes() const { return num_bytes_; }

  private:
    void* address_;
    uint64_t num_bytes_;
};

inline std::vector<Memory> memory_of_ranks(int world_size, uint64_t num_bytes) {
    if (world_size < 1 || world_size > kKcclMaxWorldSize) {
        throw Error("world_size is " + std::to_string(world_size) + ", must be between 1 and " +
                    std::to_string(kKcclMaxWorldSize));
    }
    if (num_bytes == 0) throw Error("num_bytes is 0, must be positive");
    std::vector<Memory> parts;
    for (int rank = 0; rank < world_size; ++rank) parts.emplace_back(num_bytes);
    return parts;
}

// Memory of the same size for every rank, for put() and get() and for what kernels share.
class Window {
  public:
    Window(int world_size, uint64_t num_bytes) : parts_(memory_of_ranks(world_size, num_bytes)) {}

    // Returns the window in the form in which a rank's kernel takes it. Valid as long as this
    // object lives.
    kccl::Window for_kernels(int rank) const {
        kccl::Window window = {};
        window.num_bytes = parts_[0].num_bytes();
        window.rank = rank;
        window.world_size = static_cast<int32_t>(parts_.size());
        for (std::size_t peer = 0; peer < parts_.size(); ++peer) {
            window.address[peer] = parts_[peer].address();
        }
        return window;
    }

  private:
    std::vector<Memory> parts_;
};

struct Options {
    int channels = 1;            // how many threads of a rank make calls at the same time
    uint64_t max_bytes = 65536;  // the most bytes of one call's message
    double timeout_s = 30;       // how many seconds one wait may last
    // Bytes of all slices of all ranks in publish() and collect(), each slice rounded up to 64.
    uint64_t exchange_bytes = 262144;
};

// The communicators of all ranks of a program.
class Communicator {
  public:
    Communicator(int world_size, const Options& options)
        : sizes_(sizes_of(options)),
          page_bytes_(static_cast<uint64_t>(sysconf(_SC_PAGESIZE))),
          scratches_(memory_of_ranks(
              world_size,
              layout(static_cast<uint64_t>(world_size), sizes_, page_bytes_).scratch_bytes)),
          states_(memory_of_ranks(
              world_size, sizeof(KcclState) +
                              sizeof(KcclChannelState) * static_cast<uint64_t>(options.channels))) {
        std::vector<uint64_t> addresses;
        for (const Memory& scratch : scratches_) addresses.push_back(scratch.address());
        for (int rank = 0; rank < world_size; ++rank) {
            auto* state = reinterpret_cast<KcclState*>(states_[rank].address());
            state->limit_ns = state->first_limit_ns =
                static_cast<uint64_t>(std::fmin(options.timeout_s * 1e9, 0x1p63));
            comms_.push_back(make_comm(rank, world_size, sizes_,
                                       {addresses.data(), addresses.data(), states_[rank].address(),
                                        states_[rank].address() + sizeof(KcclState)},
                                       page_bytes_, kPollsPerCheck));
            const uint64_t sentinel = comms_.back().layout.sentinel;
            std::memset(reinterpret_cast<void*>(addresses[rank] + sentinel), 0xff,
                        scratches_[rank].num_bytes() - sentinel);
        }
    }
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    int world_size() const { return static_cast<int>(comms_.size()); }

    // Returns the DeviceComm for a rank's calls. Valid as long as this object lives.
    const KcclDeviceComm& device_comm(int rank) const { return comms_[rank]; }

    // Throws if a call of this rank has failed. After a failure no call does anything.
    void check(int rank) const {
        const auto* state = reinterpret_cast<const KcclState*>(comms_[rank].state);
        if (status_of(comms_[rank]) != kKcclOk) throw Error(host::sentence(state->record, rank));
    }

    // Calls main(rank) in a thread for each rank, and returns when all have ended. If a rank
    // throws, or no thread can be started for a rank, the other ranks' waits fail. Throws the
    // exception that came first.
    template <class Main>
    void run(Main main) const {
        std::mutex mutex;
        std::exception_ptr first;
        std::vector<std::thread> threads;
        threads.reserve(comms_.size());
        const auto fail = [&](int rank, std::exception_ptr thrown) {
            const std::lock_guard lock(mutex);
            if (first == nullptr) first = thrown;
            give_up(comms_[rank], Record{kKcclAborted, rank, rank, 0, 0, 0, 0, 0, 0});
        };
        for (int rank = 0; rank < world_size(); ++rank) {
            try {
                threads.emplace_back([&, rank] {
                    try {
                        main(rank);
                    } catch (...) {
                        fail(rank, std::current_exception());
                    }
                });
            } catch (const std::exception& error) {
                // The waits of the ranks that already run fail too, so these ranks end.
                fail(rank, std::make_exception_ptr(Error(
                               "no thread could be started for rank " + std::to_string(rank) +
                               " of " + std::to_string(world_size()) + " (" + error.what() +
                               "): raise the limit of threads, as by ulimit -u, or of memory")));
                break;
            }
        }
        for (std::thread& thread : threads) thread.join();
        if (first != nullptr) std::rethrow_exception(first);
    }

  private:
    static constexpr uint32_t kPollsPerCheck = 40;

    static KcclSizes sizes_of(const Options& options) {
        if (options.channels < 1 || options.max_bytes < 1 || options.exchange_bytes < 1 ||
            !(options.timeout_s > 0)) {
            throw Error("channels, max_bytes, exchange_bytes and timeout_s must be positive");
        }
        return sizes_for_kernels(static_cast<uint32_t>(options.channels), options.max_bytes,
                                 options.exchange_bytes);
    }

    KcclSizes sizes_;
    uint64_t page_bytes_;
    std::vector<Memory> scratches_, states_;
    std::vector<KcclDeviceComm> comms_;
};

}  // namespace kccl::cpu
