// A communicator of NCCL's whose small calls KCCL makes.
#pragma once

#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "../host/host.h"
#include "../include/kccl/host.hpp"
#include "captures.h"
#include "images.h"
#include "plan.h"

namespace kccl::nccl {

// The arguments of a call that differ between ranks.
struct Arguments {
    const void* in;
    void* out;
    int root;  // of broadcast
    CUstream stream;
};

// One rank's part.
class Served {
  public:
    // Collective. Throws host::Error, on all ranks.
    // limit_s: the seconds that one wait of a kernel may last.
    Served(int rank, int world_size, double limit_s, host::Team::Allgather allgather);
    Served(const Served&) = delete;
    Served& operator=(const Served&) = delete;
    // Frees the memory. have_ended() has returned true before.
    ~Served();

    int rank() const { return team_->rank(); }

    // Enqueues a call. Notes an error as this thread's (own_error()).
    ncclResult_t call(const Choice& choice, const Arguments& arguments);

    // Frame a call that NCCL makes: it comes after the calls before, and the next one after it.
    ncclResult_t before_passing(CUstream stream);
    ncclResult_t after_passing(CUstream stream);
    // Lets what a stream gets next come after all that the other one has.
    ncclResult_t join(CUstream later, CUstream earlier);

    // Returns how the calls so far have ended, as far as the device has said.
    Status status() const { return communicator_->status(); }
    // Says what went wrong in a kernel; "": nothing.
    std::string error() const;

    // Ends the waits of kernels that run: they fail.
    void interrupt();
    // Refuses calls from now on. When this returns, no thread makes one.
    void close();
    // Waits for the kernels that were launched, also in graphs, at most so long. Returns whether
    // they have ended.
    bool have_ended(double limit_s);

  private:
    const Loaded& kernel_of(const Choice& choice) const;
    KcclGpuOp op_of(const Choice& choice, const Arguments& arguments, int channel);
    CUresult launch(const Choice& choice, const Arguments& arguments);
    CUresult launch_eager(KcclGpuOp& op, const Choice& choice, const Arguments& arguments);
    CUresult launch_captured(KcclGpuOp& op, CUstream stream, const Capture& capture);
    CUresult run(KcclGpuOp& op);
    // Copies the root's own result, where there is one.
    CUresult copy_of_root(const Choice& choice, const Arguments& arguments);
    // Let a call outside of captures come after the one before, and the next one after it.
    CUresult begin_eager(CUstream stream);
    CUresult end_eager(CUstream stream);
    // Returns how many such launches fit on the device at once; 0: none admits its dependent early.
    uint32_t fit_of(uint64_t function, const Shape& shape);

    std::unique_ptr<host::Team> team_;
    std::unique_ptr<host::Communicator> communicator_;
    std::map<KernelKey, Loaded> kernels_;
    KcclGpuQueue queue_ = {};
    KcclState state_ = {};
    CUevent last_call_ = nullptr, joined_ = nullptr;
    uint64_t last_stream_id_ = 0;
    bool has_called_ = false, is_closed_ = false;
    Captures captures_;
    uint32_t multiprocessors_ = 0;                             // of the GPU that has fewest
    std::map<std::pair<uint64_t, uint32_t>, uint32_t> rooms_;  // of fit_of()
    std::mutex calls_;                                         // held while a call is launched
};

}  // namespace kccl::nccl
