// Starts communicators, and ends them.
#include "communicators.h"

#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <set>
#include <shared_mutex>

#include "driver.h"
#include "real.h"

namespace kccl::nccl {

namespace {

std::shared_mutex lock;
// Neither is ever destroyed: when the process ends, the driver may have gone before.
auto& entries = *new std::map<ncclComm_t, std::shared_ptr<const Entry>>;
// Parts whose kernels may still run.
auto& kept = *new std::vector<std::shared_ptr<Served>>;

constexpr double kAbortS = 1;  // how long an abort waits for kernels, which its signal ends

std::string variable(const char* name) {
    const char* told = std::getenv(name);
    return told != nullptr ? told : "";
}

// The seconds that one wait may last: as NCCL's, without a limit, unless KCCL_TIMEOUT has one.
double limit_s() {
    const std::string text = variable("KCCL_TIMEOUT");
    // Some 30,000 years.
    return text.empty() ? 1e12 : std::strtod(text.c_str(), nullptr);
}

// ---- What ranks tell each other at the start ----------------------------------------------------

constexpr std::size_t kRecordBytes = 512;

// A rank of a communicator, as its peers get to know it.
struct Record {
    uint64_t random;       // of rank 0: the communicator's number
    uint64_t pid, pids;    // the process, and the namespace of such numbers
    uint64_t network;      // the namespace in which processes pass each other memory
    char machine[40];      // a number that the machine draws when it starts
    char device[16];       // the UUID of the GPU
    uint32_t abi, tables;  // what must be the same library
    char why_not[256];     // why this rank cannot; "": it can
};
static_assert(sizeof(Record) <= kRecordBytes);

uint64_t inode(const char* path) {
    struct stat found = {};
    return stat(path, &found) == 0 ? static_cast<uint64_t>(found.st_ino) : 0;
}

// An error here is NCCL's to the program: the ranks cannot agree without this rank.
void must(const char* function, CUresult code) {
    if (code == CUDA_SUCCESS) return;
    own_error() = std::string(function) + " failed: " + name_of_error(code);
    throw ncclUnhandledCudaError;
}

// All-gathers bytes by NCCL, through memory of the current device and a stream of its own.
class Exchange {
  public:
    Exchange(ncclComm_t comm, int world_size) : comm_(comm), world_size_(world_size) {
        must("cuStreamCreate", cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING));
        must("cuMemAlloc",
             cuMemAlloc(&memory_, kRecordBytes * (1 + static_cast<std::size_t>(world_size))));
    }
    ~Exchange() {
        if (memory_ != 0) cuMemFree(memory_);
        if (stream_ != nullptr) cuStreamDestroy(stream_);
    }
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    // The three steps of an exchange: the first two only enqueue.
    void begin(const void* mine, std::size_t num_bytes) {
        must("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync(memory_, mine, num_bytes, stream_));
    }
    void gather(std::size_t num_bytes) {
        const ncclResult_t result =
            KCCL_REAL(ncclAllGather, reinterpret_cast<const void*>(memory_),
                      reinterpret_cast<void*>(memory_ + kRecordBytes), num_bytes, ncclUint8, comm_,
                      reinterpret_cast<cudaStream_t>(stream_));
        if (result != ncclSuccess) throw result;
    }
    void end(void* all, std::size_t num_bytes) {
        must("cuMemcpyDtoHAsync",
             cuMemcpyDtoHAsync(all, memory_ + kRecordBytes, num_bytes * world_size_, stream_));
        must("cuStreamSynchronize", cuStreamSynchronize(stream_));
    }
    void operator()(const void* mine, void* all, std::size_t num_bytes) {
        begin(mine, num_bytes);
        gather(num_bytes);
        end(all, num_bytes);
    }

  private:
    ncclComm_t comm_;
    int world_size_;
    CUstream stream_ = nullptr;
    CUdeviceptr memory_ = 0;
};

// A device that is current while this lives.
class OnDevice {
  public:
    explicit OnDevice(int ordinal) {
        CUdevice device = 0;
        CUcontext context = nullptr;
        must("cuDeviceGet", cuDeviceGet(&device, ordinal));
        must("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&context, device));
        must("cuCtxPushCurrent", cuCtxPushCurrent(context));
        device_ = device;
    }
    ~OnDevice() {
        cuCtxPopCurrent(nullptr);
        // NCCL's communicator holds the context, too.
        cuDevicePrimaryCtxRelease(device_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    CUdevice device_ = 0;
};

// Another thread may be capturing meanwhile, which would forbid this one to allocate.
class Uncaptured {
  public:
    Uncaptured() { cuThreadExchangeStreamCaptureMode(&mode_); }
    ~Uncaptured() { cuThreadExchangeStreamCaptureMode(&mode_); }
    Uncaptured(const Uncaptured&) = delete;
    Uncaptured& operator=(const Uncaptured&) = delete;

  private:
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// A communicator that is being started.
struct Started {
    ncclComm_t comm = nullptr;
    int rank = 0, world_size = 0, ordinal = 0;
    std::unique_ptr<Exchange> exchange;
    Record mine = {};
    std::vector<std::array<char, kRecordBytes>> all;
};

template <std::size_t N>
void set(char (&to)[N], const std::string& text) {
    std::snprintf(to, N, "%s", text.c_str());
}

Record describe(const Started& rank, bool is_alone) {
    Record mine = {};
    if (getrandom(&mine.random, sizeof(mine.random), 0) != sizeof(mine.random)) mine.random = 0;
    mine.pid = static_cast<uint64_t>(getpid());
    mine.pids = inode("/proc/self/ns/pid");
    mine.network = inode("/proc/self/ns/net");
    std::string machine;
    std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), machine);
    set(mine.machine, machine);
    CUuuid uuid = {};
    cuDeviceGetUuid(&uuid, rank.ordinal);
    std::memcpy(mine.device, uuid.bytes, sizeof(mine.device));
    mine.abi = kKcclAbiVersion;
    mine.tables = tables_hash();
    if (mode() == Mode::kOff) {
        set(mine.why_not, "KCCL_NCCL=off");
    } else if (!is_alone) {
        set(mine.why_not, "its process drives several GPUs");
    } else if (machine.empty() || mine.random == 0) {
        set(mine.why_not, "the machine has no boot_id, or no random numbers");
    }
    return mine;
}

// Returns why the communicator is not served, as all ranks see it; "" if it is.
std::string why_not(const Started& rank) {
    std::vector<Record> all(rank.all.size());
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
        std::memcpy(&all[peer], rank.all[peer].data(), sizeof(Record));
    }
    const Record& first = all[0];
    std::set<std::pair<uint64_t, uint64_t>> processes;
    std::set<std::string> devices;
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
        const Record& record = all[peer];
        const std::string who = "rank " + std::to_string(peer);
        if (record.why_not[0] != '\0') return who + ": " + record.why_not;
        if (record.abi != first.abi || record.tables != first.tables) {
            return who + " has another libkccl_nccl.so than rank 0";
        }
        if (std::strcmp(record.machine, first.machine) != 0 || record.network != first.network) {
            return who + " is on another machine than rank 0, or in another container";
        }
        processes.emplace(record.pids, record.pid);
        devices.emplace(record.device, sizeof(record.device));
    }
    if (processes.size() < all.size()) return "a process has several of its ranks";
    if (devices.size() < all.size()) return "ranks share a GPU";
    return "";
}

// Starts KCCL's part, if all ranks can.
Entry agree(Started& rank) {
    Entry entry;
    entry.rank = rank.rank;
    entry.world_size = rank.world_size;
    entry.why_not = why_not(rank);
    if (!entry.why_not.empty()) return entry;
    Record first;
    std::memcpy(&first, rank.all[0].data(), sizeof(first));
    try {
        entry.served =
            std::make_shared<Served>(rank.rank, rank.world_size, first.random, limit_s(),
                                     [&](const void* mine, void* all, std::size_t num_bytes) {
                                         (*rank.exchange)(mine, all, num_bytes);
                                     });
    } catch (const host::Error& error) {
        // All ranks get here.
        entry.why_not = error.what();
    }
    return entry;
}

void note(ncclComm_t comm, Entry entry) {
    if (mode() == Mode::kLog) {
        std::fprintf(stderr, "kccl: rank %d of %d: communicator %p: %s\n", entry.rank,
                     entry.world_size, static_cast<void*>(comm),
                     entry.served != nullptr ? "KCCL makes short calls" : entry.why_not.c_str());
    }
    const std::lock_guard held(lock);
    entries[comm] = std::make_shared<const Entry>(std::move(entry));
}

}  // namespace

Mode mode() {
    static const std::string text = variable("KCCL_NCCL");
    return text == "log" ? Mode::kLog : text == "off" ? Mode::kOff : Mode::kOn;
}

std::string wrong_environment() {
    const std::string text = variable("KCCL_NCCL"), seconds = variable("KCCL_TIMEOUT");
    if (!text.empty() && mode() == Mode::kOn) {
        return "KCCL_NCCL='" + text + "' must be one of off, log";
    }
    char* end = nullptr;
    const double limit = std::strtod(seconds.c_str(), &end);
    if (!seconds.empty() && (*end != '\0' || !(limit > 0))) {
        return "KCCL_TIMEOUT='" + seconds + "' must be a positive number";
    }
    return "";
}

std::shared_ptr<const Entry> entry_of(ncclComm_t comm) {
    static const auto unknown = std::make_shared<const Entry>(
        Entry{nullptr, "the communicator was not made by ncclCommInitRank or ncclCommSplit"});
    const std::shared_lock held(lock);
    const auto found = entries.find(comm);
    return found != entries.end() ? found->second : unknown;
}

void pass(ncclComm_t comm, const std::string& why_not, bool is_blocking) {
    Entry entry;
    entry.why_not = why_not;
    entry.is_blocking = is_blocking;
    // A communicator that is still being made does not know its rank.
    if (is_blocking) {
        KCCL_REAL(ncclCommUserRank, comm, &entry.rank);
        KCCL_REAL(ncclCommCount, comm, &entry.world_size);
    }
    note(comm, std::move(entry));
}

ncclResult_t start(const std::vector<ncclComm_t>& made) try {
    const Uncaptured uncaptured;
    std::vector<Started> ranks;
    for (const ncclComm_t comm : made) {
        Started rank;
        rank.comm = comm;
        for (const ncclResult_t result : {KCCL_REAL(ncclCommUserRank, comm, &rank.rank),
                                          KCCL_REAL(ncclCommCount, comm, &rank.world_size),
                                          KCCL_REAL(ncclCommCuDevice, comm, &rank.ordinal)}) {
            if (result != ncclSuccess) return result;
        }
        // All ranks know this.
        if (!has_world_size(rank.world_size)) {
            note(comm,
                 {nullptr, "nothing was measured with so many ranks", rank.rank, rank.world_size});
            continue;
        }
        ranks.push_back(std::move(rank));
    }
    const bool is_alone = ranks.size() == 1;
    for (Started& rank : ranks) {
        const OnDevice here(rank.ordinal);
        rank.mine = describe(rank, is_alone);
        rank.exchange = std::make_unique<Exchange>(rank.comm, rank.world_size);
        rank.all.resize(rank.world_size);
        std::array<char, kRecordBytes> bytes = {};
        std::memcpy(bytes.data(), &rank.mine, sizeof(rank.mine));
        rank.exchange->begin(bytes.data(), bytes.size());
    }
    if (!is_alone) KCCL_REAL(ncclGroupStart);
    for (Started& rank : ranks) {
        const OnDevice here(rank.ordinal);
        rank.exchange->gather(kRecordBytes);
    }
    if (!is_alone) {
        if (const auto result = KCCL_REAL(ncclGroupEnd); result != ncclSuccess) return result;
    }
    for (Started& rank : ranks) {
        const OnDevice here(rank.ordinal);
        rank.exchange->end(rank.all.data(), kRecordBytes);
        note(rank.comm, agree(rank));
        rank.exchange.reset();
    }
    return ncclSuccess;
} catch (ncclResult_t result) {
    return result;
}

std::shared_ptr<Served> forget(ncclComm_t comm) {
    const std::lock_guard held(lock);
    const auto found = entries.find(comm);
    if (found == entries.end()) return nullptr;
    std::shared_ptr<Served> served = found->second->served;
    entries.erase(found);
    return served;
}

void end(std::shared_ptr<Served> served, bool has_aborted) {
    if (served == nullptr) return;
    constexpr double kNoLimit = 1e9;
    if (served->have_ended(has_aborted ? kAbortS : kNoLimit, !has_aborted)) return;
    const std::lock_guard held(lock);
    kept.push_back(std::move(served));
}

}  // namespace kccl::nccl
