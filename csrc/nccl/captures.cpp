// Orders captured calls.
#include "captures.h"

#include <algorithm>
#include <cstring>

#include "../host/cuda_driver.h"
#include "driver.h"

namespace kccl::nccl {

namespace {

// A program has far fewer captures at once.
constexpr size_t kMostCaptures = 64;

// These functions tell which edges of a graph are programmatic. CUDA has them since 12.3.
using UpdateDependencies = CUresult (*)(CUstream, const uint64_t* nodes, const uint64_t* edges,
                                        size_t count, unsigned flags);
using Dependencies = CUresult (*)(uint64_t node, uint64_t* nodes, uint64_t* edges, size_t* count);
using ChangeDependencies = CUresult (*)(uint64_t graph, const uint64_t* from, const uint64_t* to,
                                        const uint64_t* edges, size_t count);

template <class Function>
Function find(const char* name) {
    return reinterpret_cast<Function>(driver_function(name));
}

driver::CaptureInfo capture_info() {
    static const auto found = find<driver::CaptureInfo>("cuStreamGetCaptureInfo_v3");
    return found;
}

CUgraph graph_of(const Capture& capture) { return reinterpret_cast<CUgraph>(capture.graph); }

CUresult update(CUstream stream, const std::vector<uint64_t>& nodes,
                const std::vector<uint64_t>& edges, unsigned flags) {
    static const auto found = find<UpdateDependencies>("cuStreamUpdateCaptureDependencies_v2");
    return found(stream, nodes.data(), edges.data(), nodes.size(), flags);
}

}  // namespace

bool can_look() { return capture_info() != nullptr; }

CUresult look(CUstream stream, Capture* capture) {
    const uint64_t* nodes = nullptr;
    const void* edges = nullptr;
    size_t count = 0;
    const auto code = static_cast<CUresult>(
        capture_info()(reinterpret_cast<uint64_t>(stream), &capture->status, &capture->id,
                       &capture->graph, &nodes, &edges, &count));
    if (code != CUDA_SUCCESS || capture->status != driver::kCaptured) return code;
    capture->nodes.assign(nodes, nodes + count);
    capture->edges.assign(count, 0);
    if (edges != nullptr) std::memcpy(capture->edges.data(), edges, count * sizeof(uint64_t));
    return code;
}

// Tells whether a launch that depends on these nodes comes after the last call. "No" may be wrong:
// the search has an end, because a graph may have many nodes.
bool Captures::come_after(const Calls& calls, std::vector<uint64_t> nodes) {
    static const auto dependencies = find<Dependencies>("cuGraphNodeGetDependencies_v2");
    constexpr size_t kMostNodes = 256, kMostEdges = 16;
    for (size_t i = 0; i < nodes.size() && i < kMostNodes; ++i) {
        if (nodes[i] == calls.last) return true;
        if (calls.nodes.contains(nodes[i])) continue;
        uint64_t before[kMostEdges], edges[kMostEdges];
        size_t count = kMostEdges;
        if (dependencies(nodes[i], before, edges, &count) != CUDA_SUCCESS) return false;
        for (size_t j = 0; j < std::min(count, kMostEdges); ++j) {
            // Behind another edge a kernel may come before that node's end.
            const bool is_new = std::ranges::find(nodes, before[j]) == nodes.end();
            if (edges[j] == 0 && is_new) nodes.push_back(before[j]);
        }
    }
    return false;
}

// Lets the stream's next launch come after the last call, by few edges: none from earlier calls,
// and one from the last call only where nothing else comes after it. A launch with a single edge,
// from a call, is a programmatic dependent. PyTorch's streams wait for each other around each call,
// so they depend on all calls before.
CUresult Captures::order(const Calls& calls, CUstream stream, const Capture& capture) {
    std::vector<uint64_t> nodes, edges, ended;
    for (size_t i = 0; i < capture.nodes.size(); ++i) {
        if (calls.nodes.contains(capture.nodes[i])) continue;
        nodes.push_back(capture.nodes[i]);
        edges.push_back(capture.edges[i]);
        if (edges.back() == 0) ended.push_back(nodes.back());
    }
    if (!come_after(calls, ended)) {
        nodes.push_back(calls.last);
        edges.push_back(0);
    }
    if (nodes == capture.nodes) return CUDA_SUCCESS;
    return update(stream, nodes, edges, CU_STREAM_SET_CAPTURE_DEPENDENCIES);
}

// The node has no other node before it, so that it is over when the graph's first call comes.
CUresult Captures::wait_for_graphs(CUstream stream, const Capture& capture) const {
    CUgraphNode node = nullptr;
    const CUresult code = cuGraphAddEventWaitNode(&node, graph_of(capture), nullptr, 0, graphs_);
    if (code != CUDA_SUCCESS) return code;
    return update(stream, {reinterpret_cast<uint64_t>(node)}, {0},
                  CU_STREAM_ADD_CAPTURE_DEPENDENCIES);
}

// A graph has one record, which moves behind each new call: with one for each call, nothing would
// say which of them is the last.
CUresult Captures::move_record(Calls& calls, uint64_t graph, uint64_t last) const {
    static const auto add = find<ChangeDependencies>("cuGraphAddDependencies_v2");
    static const auto remove = find<ChangeDependencies>("cuGraphRemoveDependencies_v2");
    if (calls.record == 0) {
        const auto before = reinterpret_cast<CUgraphNode>(last);
        CUgraphNode node = nullptr;
        const CUresult code =
            cuGraphAddEventRecordNode(&node, reinterpret_cast<CUgraph>(graph), &before, 1, graphs_);
        calls.record = reinterpret_cast<uint64_t>(node);
        return code;
    }
    constexpr uint64_t kFromTheEnd = 0;
    const CUresult code = add(graph, &last, &calls.record, &kFromTheEnd, 1);
    if (code != CUDA_SUCCESS) return code;
    return remove(graph, &calls.last, &calls.record, &kFromTheEnd, 1);
}

CUresult Captures::start() { return cuEventCreate(&graphs_, CU_EVENT_DISABLE_TIMING); }

CUresult Captures::before(CUstream stream, const Capture& capture) {
    has_graphs_ = true;
    const auto found = calls_.find(capture.id);
    return found == calls_.end() ? wait_for_graphs(stream, capture)
                                 : order(found->second, stream, capture);
}

CUresult Captures::after(CUstream stream, const Capture& capture) {
    Capture now;
    CUresult code = look(stream, &now);
    if (code != CUDA_SUCCESS) return code;
    // What was launched is the only node on which the stream's next launch depends.
    if (now.nodes.size() != 1) return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    Calls& calls = calls_[capture.id];
    code = move_record(calls, capture.graph, now.nodes[0]);
    calls.last = now.nodes[0];
    calls.nodes.insert(calls.last);
    if (calls_.size() > kMostCaptures) calls_.erase(calls_.begin());
    return code;
}

CUresult Captures::query() const { return has_graphs_ ? cuEventQuery(graphs_) : CUDA_SUCCESS; }

void Captures::end() {
    if (graphs_ != nullptr && !has_graphs_) cuEventDestroy(graphs_);
    graphs_ = nullptr;
}

}  // namespace kccl::nccl
