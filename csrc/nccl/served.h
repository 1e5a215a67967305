// A communicator of NCCL's whose small calls KCCL makes.
#pragma once

#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "../host/host.h"
#include "../include/kccl/host.hpp"
#include "plan.h"

namespace kccl::nccl {

// The arguments of a call that differ between ranks.
struct Arguments {
    const void* in;
    void* out;
    int root;  // of broadcast
    CUstream stream;
};

struct Capture;

// The calls of a communicator in a capture, whose number is `id`: nodes of its graph, each behind
// the one before.
struct Captured {
    uint64_t id = 0;
    uint64_t last = 0;  // 0: there is none
    std::set<uint64_t> calls;
};

// One rank's part.
class Served {
  public:
    // Collective. Throws host::Error, on all ranks.
    // id: a number that all ranks share, and no other communicator has. limit_s: the seconds that
    // one wait of a kernel may last.
    Served(int rank, int world_size, uint64_t id, double limit_s, host::Team::Allgather allgather);
    Served(const Served&) = delete;
    Served& operator=(const Served&) = delete;
    // Frees the memory; see may_end().
    ~Served();

    uint64_t id() const { return id_; }
    int rank() const { return team_->rank(); }

    // Enqueues a call. Notes an error as this thread's (own_error()).
    ncclResult_t call(const Choice& choice, const Arguments& arguments);

    // Returns how the calls so far have ended, as far as the device has said.
    Status status() const { return communicator_->status(); }
    // Says what went wrong in a kernel; "": nothing.
    std::string error() const;

    // Ends the waits of kernels that run: they fail.
    void interrupt();
    // Waits for the kernels that were launched, at most so long. Returns whether they have ended.
    // Where calls were captured, graphs may still run: only the device's end of all work tells, and
    // that is waited for only with `waits_for_graphs`.
    bool have_ended(double limit_s, bool waits_for_graphs);

  private:
    KcclGpuOp op_of(const Choice& choice, const Arguments& arguments, int channel);
    CUresult launch(const Choice& choice, const Arguments& arguments);
    CUresult launch_eager(KcclGpuOp& op, CUstream stream);
    CUresult launch_captured(KcclGpuOp& op, CUstream stream, const Capture& capture);
    CUresult run(KcclGpuOp& op);
    // Returns how many such launches fit on the device at once.
    uint32_t fit_of(uint64_t function, const Shape& shape);

    uint64_t id_;
    std::unique_ptr<host::Team> team_;
    std::unique_ptr<host::Communicator> communicator_;
    KcclGpuQueue queue_ = {};
    KcclState state_ = {};
    CUevent last_call_ = nullptr;
    uint64_t last_stream_id_ = 0;
    bool has_called_ = false, has_captured_ = false;
    Captured captured_;
    int multiprocessors_ = 0;
    std::map<std::pair<uint64_t, uint32_t>, uint32_t> rooms_;  // of fit_of()
    std::mutex calls_;                                         // held while a call is launched
};

}  // namespace kccl::nccl
