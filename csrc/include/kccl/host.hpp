// A communicator of NVIDIA GPUs for C++ programs without Python: a process for each rank, with a
// GPU each, all on one machine. It needs CUDA's driver API (link with -lcuda) and a function that
// all-gathers bytes:
//
//     cudaSetDevice(rank);
//     kccl::host::Team team(rank, world_size, [](const void* mine, void* all, std::size_t bytes) {
//         MPI_Allgather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, MPI_COMM_WORLD);
//     });
//     kccl::host::Communicator comm(team, {.channels = 132, .max_bytes = 65536, .timeout_s = 30});
//     mine<<<132, 512>>>(comm.device_comm(), ...);
//     cudaDeviceSynchronize();
//     comm.check();  // throws what went wrong in the kernel
//
// The processes share memory as file descriptors, so memory of a peer that dies stays mapped. A
// failure of one rank while memory is set up is thrown on all ranks, with the same words.
#pragma once

#include <cuda.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "device_comm.h"
#include "host_team.hpp"
#include "record.hpp"

namespace kccl::host {

// While this object lives, this thread's calls of CUDA go to the team's device.
class Current {
  public:
    explicit Current(const Team& team) { cuCtxPushCurrent(team.context()); }
    ~Current() { cuCtxPopCurrent(nullptr); }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
};

// Copies and fills on a stream of its own, which waits for no kernel: a kernel may wait for a rank
// that comes here first.
class Copies {
  public:
    explicit Copies(const Team& team) : team_(team) {
        team.must("cuStreamCreate", cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
    }
    ~Copies() { cuStreamDestroy(stream_); }
    Copies(const Copies&) = delete;
    Copies& operator=(const Copies&) = delete;

    void fill(CUdeviceptr to, unsigned char value, std::size_t num_bytes) const {
        team_.must("cuMemsetD8Async", cuMemsetD8Async(to, value, num_bytes, stream_));
    }
    void write(CUdeviceptr to, const void* from, std::size_t num_bytes) const {
        team_.must("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync(to, from, num_bytes, stream_));
    }
    void wait() const { team_.must("cuStreamSynchronize", cuStreamSynchronize(stream_)); }

  private:
    const Team& team_;
    CUstream stream_ = nullptr;
};

// ---- Windows ------------------------------------------------------------------------------------

// Memory of the same size on every rank, which all ranks map; zero at first.
class Window {
  public:
    // Allocates and maps the memory. Collective. timeout_s: how long a rank waits for the others'
    // memory.
    Window(const Team& team, std::size_t num_bytes, double timeout_s) : team_(team) {
        team.agree("num_bytes", num_bytes);
        CUmemGenericAllocationHandle own = 0;
        Fd shared;
        addresses_.resize(team.world_size());
        team.together([&] {
            if (num_bytes == 0) throw Error("num_bytes is 0, must be positive");
            CUmemAllocationProp properties = {};
            properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
            properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
            properties.location.id = team.device();
            properties.requestedHandleTypes = kKind;
            std::size_t unit = 0;
            team.must("cuMemGetAllocationGranularity",
                      cuMemGetAllocationGranularity(&unit, &properties,
                                                    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
            num_bytes_ = (num_bytes + unit - 1) / unit * unit;
            team.must("cuMemCreate", cuMemCreate(&own, num_bytes_, &properties, 0), num_bytes_);
            map(team.rank(), own);
            int fd = -1;
            team.must("cuMemExportToShareableHandle",
                      cuMemExportToShareableHandle(&fd, own, kKind, 0));
            shared = Fd(fd);
            fill(0, 0);
        });
        const std::vector<Fd> fds = team.exchange(shared, timeout_s);
        team.together([&] {
            for (int peer = 0; peer < team.world_size(); ++peer) {
                if (peer == team.rank()) continue;
                CUmemGenericAllocationHandle handle = 0;
                void* fd = reinterpret_cast<void*>(static_cast<intptr_t>(fds[peer].get()));
                team.must("cuMemImportFromShareableHandle",
                          cuMemImportFromShareableHandle(&handle, fd, kKind));
                map(peer, handle);
            }
        });
    }
    ~Window() {
        const Current here(team_);
        // Kernels that have been launched may still use the window.
        team_.wait_for_kernels();
        undo_.run();
    }
    Window(const Window&) = delete;
    Window& operator=(const Window&) = delete;

    std::size_t num_bytes() const { return num_bytes_; }
    // Returns the address at which this rank's GPU maps a rank's part.
    CUdeviceptr address(int rank) const { return addresses_[rank]; }

    // Returns a kernel's argument. It is valid as long as this object lives.
    kccl::Window for_kernels() const {
        kccl::Window window = {};
        window.num_bytes = num_bytes_;
        window.rank = team_.rank();
        window.world_size = team_.world_size();
        for (int peer = 0; peer < team_.world_size(); ++peer) window.address[peer] = address(peer);
        return window;
    }

    // Sets all bytes of this rank's part from `begin` to the end to `value`.
    void fill(std::size_t begin, unsigned char value) const {
        const Copies copies(team_);
        copies.fill(address(team_.rank()) + begin, value, num_bytes_ - begin);
        copies.wait();
    }

  private:
    static constexpr auto kKind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

    // Maps a rank's part. Takes over the handle, which is released when the window is destroyed.
    void map(int rank, CUmemGenericAllocationHandle handle) {
        const std::size_t size = num_bytes_;
        CUdeviceptr& at = addresses_[rank];
        undo_.add([handle] { cuMemRelease(handle); });
        team_.must("cuMemAddressReserve", cuMemAddressReserve(&at, size, 0, 0, 0), size);
        undo_.add([at, size] { cuMemAddressFree(at, size); });
        team_.must("cuMemMap", cuMemMap(at, size, 0, handle, 0), size);
        undo_.add([at, size] { cuMemUnmap(at, size); });
        CUmemAccessDesc access = {};
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = team_.device();
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        team_.must("cuMemSetAccess", cuMemSetAccess(at, size, &access, 1), size);
    }

    const Team& team_;
    std::size_t num_bytes_ = 0;
    std::vector<CUdeviceptr> addresses_;
    Undo undo_;
};

// ---- What went wrong in a kernel ----------------------------------------------------------------

// Thrown when a call in a kernel has failed.
struct Failure : Error {
    Failure(const std::string& sentence, const KcclRecord& why) : Error(sentence), record(why) {}
    KcclRecord record;
};

// ---- The communicator ---------------------------------------------------------------------------

// All except timeout_s must be the same on all ranks.
struct Options {
    int channels;        // how many blocks or warps of a kernel make calls at the same time
    uint64_t max_bytes;  // the most bytes of one coop's message
    double timeout_s;    // seconds that one wait may last, also for a peer whose process has ended
    // Bytes of all slices of all ranks in publish() and collect(), each slice rounded up to 64.
    uint64_t exchange_bytes = 262144;
};

// The memory by which this rank's kernels talk to their peers. Only one kernel at a time may use
// it.
class Communicator {
  public:
    // Collective. Returns when the kernels of all ranks may use this communicator.
    Communicator(const Team& team, const Options& options)
        : Communicator(team, sizes_of(team, options), options.timeout_s, options.timeout_s) {}

    // Collective, too: sizes that fit and are equal on all ranks. start_s: how long a rank waits
    // for the others' memory; timeout_s: how long one wait in a kernel may last.
    Communicator(const Team& team, const KcclSizes& sizes, double start_s, double timeout_s)
        : team_(team) {
        const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
        const KcclLayout regions =
            layout(static_cast<uint64_t>(team.world_size()), sizes, page_bytes);
        window_ = std::make_unique<Window>(team, regions.scratch_bytes, start_s);
        std::vector<uint64_t> windows;
        for (int peer = 0; peer < team.world_size(); ++peer) {
            windows.push_back(window_->address(peer));
        }
        // together() returns on all ranks only after all have prepared their memory, so no kernel
        // writes to a peer that is not ready.
        team.together([&] {
            const CUdeviceptr state = make_states(sizes, timeout_s);
            comm_ = make_comm(team.rank(), team.world_size(), sizes,
                              {windows.data(), windows.data(), state, state + sizeof(KcclState)},
                              page_bytes, kKcclGpuPollsPerCheck);
            window_->fill(regions.sentinel, 0xff);
        });
    }

    // Waits for this rank's kernels. Then tells the peers that this rank has left, or, if an
    // exception ends the communicator, that it gave up.
    ~Communicator() {
        const Current here(team_);
        team_.wait_for_kernels();
        if (status() == kKcclOk) depart();
        undo_.run();
    }
    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;

    // Returns a kernel's argument. It is valid as long as this object lives.
    const KcclDeviceComm& device_comm() const { return comm_; }

    // What this rank's kernels tell the host, and what ends their waits.
    KcclMailbox* mailbox() const { return mailbox_; }

    // Returns the status of the calls in kernels that have ended.
    Status status() const {
        return static_cast<Status>(
            std::atomic_ref<uint32_t>(mailbox_->status).load(std::memory_order_acquire));
    }

    // Throws Failure if a call failed in a kernel that has ended. After a failure no call does
    // anything.
    void check() const {
        if (status() != kKcclOk)
            throw Failure(sentence(mailbox_->record, comm_.rank), mailbox_->record);
    }

  private:
    // Returns the sizes for the options, which it compares between the ranks. Collective.
    static KcclSizes sizes_of(const Team& team, const Options& options) {
        team.agree("channels", static_cast<uint64_t>(options.channels));
        team.agree("max_bytes", options.max_bytes);
        team.agree("exchange_bytes", options.exchange_bytes);
        team.together([&] {
            if (options.channels < 1 || options.max_bytes < 1 || options.exchange_bytes < 1 ||
                !(options.timeout_s > 0)) {
                throw Error("channels, max_bytes, exchange_bytes and timeout_s must be positive");
            }
        });
        return sizes_for_kernels(static_cast<uint32_t>(options.channels), options.max_bytes,
                                 options.exchange_bytes);
    }

    // Allocates the mailbox and the states. Returns the address of this rank's KcclState on the
    // device. Its KcclChannelStates follow.
    CUdeviceptr make_states(const KcclSizes& sizes, double timeout_s) {
        void* mail = nullptr;
        team_.must("cuMemHostAlloc",
                   cuMemHostAlloc(&mail, sizeof(KcclMailbox),
                                  CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
        undo_.add([mail] { cuMemFreeHost(mail); });
        mailbox_ = new (mail) KcclMailbox{};
        CUdeviceptr mail_there = 0;
        team_.must("cuMemHostGetDevicePointer", cuMemHostGetDevicePointer(&mail_there, mail, 0));
        const std::size_t num_bytes = sizeof(KcclState) + sizeof(KcclChannelState) *
                                                              std::size_t{sizes.num_channels} *
                                                              sizes.blocks_per_channel;
        CUdeviceptr states = 0;
        team_.must("cuMemAlloc", cuMemAlloc(&states, num_bytes), num_bytes);
        undo_.add([states] { cuMemFree(states); });
        KcclState first = {};
        first.limit_ns = first.first_limit_ns =
            static_cast<uint64_t>(std::fmin(timeout_s * 1e9, 0x1p63));
        first.idle_context = mail_there;
        const Copies copies(team_);
        copies.fill(states, 0, num_bytes);
        copies.write(states, &first, sizeof(first));
        copies.wait();
        return states;
    }

    void depart() const {
        const bool gave_up = std::uncaught_exceptions() > exceptions_before_;
        const uint32_t departure = gave_up ? kKcclGaveUp : kKcclLeft;
        KcclRecord record = {};
        record.status = kKcclAborted;
        record.rank = record.peer = comm_.rank;
        const uint64_t line = comm_.layout.records + comm_.rank * uint64_t{kKcclLineBytes};
        const uint64_t word = comm_.layout.abort + comm_.rank * sizeof(departure);
        CUstream stream = nullptr;
        if (cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS) return;
        for (int peer = 0; peer < comm_.world_size; ++peer) {
            if (peer == comm_.rank) continue;
            if (gave_up) {
                cuMemcpyHtoDAsync(comm_.window[peer] + line, &record, sizeof(record), stream);
            }
            cuMemcpyHtoDAsync(comm_.window[peer] + word, &departure, sizeof(departure), stream);
        }
        cuStreamSynchronize(stream);
        cuStreamDestroy(stream);
    }

    const Team& team_;
    const int exceptions_before_ = std::uncaught_exceptions();
    KcclDeviceComm comm_ = {};
    std::unique_ptr<Window> window_;
    KcclMailbox* mailbox_ = nullptr;
    Undo undo_;
};

}  // namespace kccl::host
