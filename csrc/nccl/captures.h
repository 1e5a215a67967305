// The order of a communicator's calls in CUDA graphs.
//
// In a capture each call comes after the call before, whatever their streams. A graph begins with a
// node that waits for an event, and that event's record comes after the graph's last call. So
// graphs with calls of one communicator run one after the other, in the order in which they are
// launched, also on different streams.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace kccl::nccl {

// What a stream's next launch depends on in a capture.
struct Capture {
    int status = 0;
    uint64_t id = 0, graph = 0;
    std::vector<uint64_t> nodes;
    std::vector<uint64_t> edges;  // the CUgraphEdgeData from each node; 0: from its end
};

// Asks for a stream's capture.
CUresult look(CUstream stream, Capture* capture);

// Tells whether the driver has the functions that are needed here: from CUDA 12.3 on.
bool can_look();

// While one lives, this thread may call what another thread's capture forbids, as to allocate.
class Uncaptured {
  public:
    Uncaptured() { cuThreadExchangeStreamCaptureMode(&mode_); }
    ~Uncaptured() { cuThreadExchangeStreamCaptureMode(&mode_); }
    Uncaptured(const Uncaptured&) = delete;
    Uncaptured& operator=(const Uncaptured&) = delete;

  private:
    CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

// The captured calls of a communicator. The caller lets one thread at a time in.
class Captures {
  public:
    Captures() = default;
    Captures(const Captures&) = delete;
    Captures& operator=(const Captures&) = delete;

    // Makes the event. Called once, before all else.
    CUresult start();

    // Lets a stream's next launch come after the calls before.
    CUresult before(CUstream stream, const Capture& capture);
    // Notes what was launched as a call.
    CUresult after(CUstream stream, const Capture& capture);

    // Returns CUDA_SUCCESS if no graph that was launched runs, or CUDA_ERROR_NOT_READY.
    CUresult query() const;
    // Frees the event, unless a graph may have it.
    void end();

  private:
    // The calls in a capture: nodes of its graph, each behind the one before.
    struct Calls {
        uint64_t last = 0;    // 0: there is none
        uint64_t record = 0;  // the node of the event's record
        std::set<uint64_t> nodes;
    };

    static bool come_after(const Calls& calls, std::vector<uint64_t> nodes);
    static CUresult order(const Calls& calls, CUstream stream, const Capture& capture);
    CUresult wait_for_graphs(CUstream stream, const Capture& capture) const;
    CUresult move_record(Calls& calls, uint64_t graph, uint64_t last) const;

    CUevent graphs_ = nullptr;
    bool has_graphs_ = false;
    std::map<uint64_t, Calls> calls_;  // by the captures' numbers, which ascend
};

}  // namespace kccl::nccl
