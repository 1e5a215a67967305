// Starts communicators, and ends them.
#include "communicators.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <stdexcept>
#include <utility>

#include "calls.h"
#include "driver.h"
#include "peers.h"
#include "real.h"

namespace kccl::nccl {

namespace {

std::shared_mutex lock;
// Neither is ever destroyed: when the process ends, the driver may have gone before.
auto& entries = *new std::map<ncclComm_t, std::shared_ptr<const Entry>>;
// Parts whose kernels may still run.
auto& kept = *new std::vector<std::shared_ptr<Served>>;

constexpr double kAbortS = 1;  // how long an abort waits for kernels, which its signal ends

// The seconds that one wait may last: as NCCL's, without a limit, unless KCCL_TIMEOUT has one.
double limit_s() {
    const std::string text = variable("KCCL_TIMEOUT");
    // Some 30,000 years.
    return text.empty() ? 1e12 : std::strtod(text.c_str(), nullptr);
}

// ---- What ranks tell each other at the start ----------------------------------------------------

constexpr std::size_t kRecordBytes = 512;
static_assert(sizeof(Record) <= kRecordBytes);

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
        if (num_bytes > kRecordBytes) throw std::length_error("a rank tells too much at once");
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

// A group of NCCL's, which ends when this does. is_wanted: there is one.
class RealGroup {
  public:
    explicit RealGroup(bool is_wanted) : is_open_(is_wanted) {
        if (is_wanted) KCCL_REAL(ncclGroupStart);
    }
    ~RealGroup() { end(); }
    RealGroup(const RealGroup&) = delete;
    RealGroup& operator=(const RealGroup&) = delete;
    ncclResult_t end() {
        return std::exchange(is_open_, false) ? KCCL_REAL(ncclGroupEnd) : ncclSuccess;
    }

  private:
    bool is_open_;
};

// A communicator that is being started.
struct Started {
    ncclComm_t comm = nullptr;
    int rank = 0, world_size = 0, ordinal = 0;
    std::unique_ptr<Exchange> exchange;
    Record mine = {};
    std::vector<std::array<char, kRecordBytes>> all;
};

// Starts KCCL's part, if all ranks can.
Entry agree(Started& rank) {
    Entry entry;
    entry.rank = rank.rank;
    entry.world_size = rank.world_size;
    std::vector<Record> all(rank.all.size());
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
        std::memcpy(&all[peer], rank.all[peer].data(), sizeof(Record));
    }
    entry.why_not = why_not(all);
    if (!entry.why_not.empty()) return entry;
    try {
        entry.served =
            std::make_shared<Served>(rank.rank, rank.world_size, limit_s(),
                                     [&](const void* mine, void* all, std::size_t num_bytes) {
                                         (*rank.exchange)(mine, all, num_bytes);
                                     });
    } catch (const host::Error& error) {
        // All ranks get here.
        entry.why_not = error.what();
    }
    return entry;
}

void log_real() {
    int version = 0;
    KCCL_REAL(ncclGetVersion, &version);
    std::fprintf(stderr, "kccl: the NCCL behind is %d of %s\n", version, real_file().c_str());
}

void note(ncclComm_t comm, Entry entry) {
    if (mode() == Mode::kLog) {
        static std::once_flag once;
        std::call_once(once, [] {
            log_real();
            log_counts_at_exit();
        });
        std::fprintf(stderr, "kccl: rank %d of %d: communicator %p: %s\n", entry.rank,
                     entry.world_size, static_cast<void*>(comm),
                     entry.served != nullptr ? "KCCL makes short calls" : entry.why_not.c_str());
    }
    const std::lock_guard held(lock);
    entries[comm] = std::make_shared<const Entry>(std::move(entry));
}

// Frees the memory of communicators that have ended since they were kept.
void free_kept() {
    std::vector<std::shared_ptr<Served>> ended;  // freed behind the lock
    const std::lock_guard held(lock);
    std::erase_if(kept, [&](const std::shared_ptr<Served>& served) {
        if (!served->have_ended(0)) return false;
        ended.push_back(served);
        return true;
    });
}

void keep(const std::shared_ptr<Served>& served) {
    const std::lock_guard held(lock);
    kept.push_back(served);
}

// Lets no more calls in. Returns whether the kernels have ended.
bool has_stopped(Served& served, double limit_s) {
    served.close();
    return served.have_ended(limit_s);
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
    free_kept();
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
            note(comm, {nullptr, "this build has no kernels for so many ranks", rank.rank,
                        rank.world_size});
            continue;
        }
        ranks.push_back(std::move(rank));
    }
    const bool is_alone = ranks.size() == 1;
    std::set<int> ordinals;
    for (const Started& rank : ranks) ordinals.insert(rank.ordinal);
    const char* reason = ordinals.size() > 1 ? "its process drives several GPUs"
                         : !is_alone         ? "a group makes several communicators"
                                             : "";
    for (Started& rank : ranks) {
        const OnDevice here(rank.ordinal);
        rank.mine = describe(rank.ordinal, reason);
        rank.exchange = std::make_unique<Exchange>(rank.comm, rank.world_size);
        rank.all.resize(rank.world_size);
        std::array<char, kRecordBytes> bytes = {};
        std::memcpy(bytes.data(), &rank.mine, sizeof(rank.mine));
        rank.exchange->begin(bytes.data(), bytes.size());
    }
    RealGroup together(!is_alone);
    for (Started& rank : ranks) {
        const OnDevice here(rank.ordinal);
        rank.exchange->gather(kRecordBytes);
    }
    if (const auto result = together.end(); result != ncclSuccess) return result;
    for (Started& rank : ranks) {
        const OnDevice here(rank.ordinal);
        rank.exchange->end(rank.all.data(), kRecordBytes);
        note(rank.comm, agree(rank));
        rank.exchange.reset();
    }
    return ncclSuccess;
} catch (...) {
    return caught();
}

std::shared_ptr<Served> forget(ncclComm_t comm) {
    const std::lock_guard held(lock);
    const auto found = entries.find(comm);
    if (found == entries.end()) return nullptr;
    std::shared_ptr<Served> served = found->second->served;
    entries.erase(found);
    return served;
}

void end(ncclComm_t comm) {
    free_kept();
    const auto served = entry_of(comm)->served;
    constexpr double kNoLimit = 1e9;
    // The communicator is not forgotten yet, so that another thread may abort it meanwhile.
    const bool has_ended = served == nullptr || has_stopped(*served, kNoLimit);
    // Null if it was aborted.
    if (forget(comm) != nullptr && !has_ended) keep(served);
}

void end_aborted(const std::shared_ptr<Served>& served) {
    free_kept();
    if (served != nullptr && !has_stopped(*served, kAbortS)) keep(served);
}

}  // namespace kccl::nccl
