// The part of a fake CUDA driver that orders streams: events, captures and graphs. Streams do at
// once what they are given. A graph runs its nodes in a random order that its edges allow, another
// one on each rank.
//
// fake_cuda_count() tells how often streams were made to wait for each other, and how many launches
// of graphs are not between the graph's wait for an event and the event's record.
#include "fake_captures.hpp"

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace driver = kccl::driver;
using fake::Node;

namespace {

struct Graph {
    uint64_t id = 0;
    bool is_valid = true;
    std::vector<Node*> nodes;
};

// Where a stream stands in a capture; graph 0: in none.
struct Place {
    Graph* graph = nullptr;
    std::vector<uint64_t> nodes;
};

std::mutex lock;
std::map<CUstream, Place> places;
std::map<CUevent, Place> events;
std::map<std::string, int> counts;
std::atomic<int> running = 0;  // graphs

CUstreamCaptureStatus status_of(const Place& place) {
    if (place.graph == nullptr) return CU_STREAM_CAPTURE_STATUS_NONE;
    return place.graph->is_valid ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                 : CU_STREAM_CAPTURE_STATUS_INVALIDATED;
}

// Adds nodes that are not there yet.
void add_nodes(Place& place, const uint64_t* nodes, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        if (std::ranges::count(place.nodes, nodes[i]) == 0) place.nodes.push_back(nodes[i]);
    }
}

const Node* node_of(uint64_t number) { return reinterpret_cast<const Node*>(number); }

Node* add_event_node(CUgraph graph, fake::Kind kind, const CUgraphNode* before, size_t count) {
    auto* node = new Node;
    node->kind = kind;
    for (size_t i = 0; i < count; ++i) {
        node->before.push_back(reinterpret_cast<uint64_t>(before[i]));
    }
    reinterpret_cast<Graph*>(graph)->nodes.push_back(node);
    return node;
}

// Tells whether a node comes after another one.
bool comes_after(const Node* node, const Node* other) {
    return std::ranges::any_of(node->before, [&](uint64_t number) {
        return node_of(number) == other || comes_after(node_of(number), other);
    });
}

// Counts a graph's launches that another graph may overtake.
int count_open(const Graph& graph) {
    int number = 0;
    for (const Node* launch : graph.nodes) {
        if (launch->kind != fake::Kind::kLaunch) continue;
        const bool has_wait = std::ranges::any_of(graph.nodes, [&](const Node* node) {
            return node->kind == fake::Kind::kWait && comes_after(launch, node);
        });
        const bool has_record = std::ranges::any_of(graph.nodes, [&](const Node* node) {
            return node->kind == fake::Kind::kRecord && comes_after(node, launch);
        });
        number += !has_wait || !has_record;
    }
    return number;
}

}  // namespace

namespace fake {

CUresult enqueue(const Node& what, CUstream stream) {
    {
        const std::lock_guard held(lock);
        Place& place = places[stream];
        if (place.graph != nullptr) {
            if (!place.graph->is_valid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            auto* node = new Node(what);
            node->parameters[0] = &node->call;
            node->before = place.nodes;
            place.graph->nodes.push_back(node);
            place.nodes = {reinterpret_cast<uint64_t>(node)};
            return CUDA_SUCCESS;
        }
    }
    run(what);
    return CUDA_SUCCESS;
}

void count(const char* what) {
    const std::lock_guard held(lock);
    ++counts[what];
}

}  // namespace fake

extern "C" {

int fake_cuda_count(const char* what) {
    const std::lock_guard held(lock);
    return counts[what];
}

// ---- Streams and events -------------------------------------------------------------------------

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
// In a capture the driver refuses, and the capture is lost.
CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
    const std::lock_guard held(lock);
    if (Graph* graph = places[stream].graph; graph != nullptr) {
        graph->is_valid = false;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    *id = reinterpret_cast<uint64_t>(stream);
    return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* event, unsigned int) {
    *event = static_cast<CUevent>(std::malloc(1));
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
    std::free(event);
    return CUDA_SUCCESS;
}
// Only graphs take time.
CUresult cuEventQuery(CUevent) { return running > 0 ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) {
    const std::lock_guard held(lock);
    events[event] = places[stream];
    return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
    const std::lock_guard held(lock);
    ++counts["waits"];
    const Place& recorded = events[event];
    if (recorded.graph == nullptr) return CUDA_SUCCESS;
    Place& place = places[stream];
    place.graph = recorded.graph;
    add_nodes(place, recorded.nodes.data(), recorded.nodes.size());
    return CUDA_SUCCESS;
}

// ---- Captures and graphs ------------------------------------------------------------------------

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
    static uint64_t id = 0;
    const std::lock_guard held(lock);
    places[stream] = {new Graph{++id, true, {}}, {}};
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    const std::lock_guard held(lock);
    Graph* captured = places[stream].graph;
    *graph = captured->is_valid ? reinterpret_cast<CUgraph>(captured) : nullptr;
    for (auto& each : places) {
        if (each.second.graph == captured) each.second = {};
    }
    return captured->is_valid ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    const std::lock_guard held(lock);
    *status = status_of(places[stream]);
    return CUDA_SUCCESS;
}

// The library knows these by their types without cuda.h (csrc/host/cuda_driver.h).
#define FAKE_CUDA_NAME(name) __asm__(#name)
int capture_info(CUstream stream, int* status, uint64_t* id, uint64_t* graph,
                 const uint64_t** nodes, const void** edges, size_t* count)
    FAKE_CUDA_NAME(cuStreamGetCaptureInfo_v3);
int set_dependencies(CUstream, const uint64_t* nodes, const void*, size_t count, unsigned int)
    FAKE_CUDA_NAME(cuStreamUpdateCaptureDependencies_v2);
int dependencies(uint64_t, uint64_t* nodes, uint64_t* edges, size_t* count)
    FAKE_CUDA_NAME(cuGraphNodeGetDependencies_v2);
int add_edges(uint64_t, const uint64_t* from, const uint64_t* to, const uint64_t*, size_t count)
    FAKE_CUDA_NAME(cuGraphAddDependencies_v2);
int remove_edges(uint64_t, const uint64_t* from, const uint64_t* to, const uint64_t*, size_t count)
    FAKE_CUDA_NAME(cuGraphRemoveDependencies_v2);
int node_type(uint64_t, int* type) FAKE_CUDA_NAME(cuGraphNodeGetType);
int get_params(uint64_t number, driver::KernelNode* filled)
    FAKE_CUDA_NAME(cuGraphKernelNodeGetParams_v2);
int set_params(uint64_t number, const driver::KernelNode* params)
    FAKE_CUDA_NAME(cuGraphKernelNodeSetParams_v2);

int capture_info(CUstream stream, int* status, uint64_t* id, uint64_t* graph,
                 const uint64_t** nodes, const void** edges, size_t* count) {
    const std::lock_guard held(lock);
    const Place& place = places[stream];
    *status = status_of(place);
    if (*status != driver::kCaptured) return 0;
    *id = place.graph->id;
    *graph = reinterpret_cast<uint64_t>(place.graph);
    *nodes = place.nodes.data();
    *edges = nullptr;
    *count = place.nodes.size();
    return 0;
}
int set_dependencies(CUstream stream, const uint64_t* nodes, const void*, size_t count,
                     unsigned int flags) {
    const std::lock_guard held(lock);
    if (flags == CU_STREAM_ADD_CAPTURE_DEPENDENCIES) {
        add_nodes(places[stream], nodes, count);
        return 0;
    }
    ++counts["changes of edges"];
    places[stream].nodes.assign(nodes, nodes + count);
    return 0;
}
int dependencies(uint64_t number, uint64_t* nodes, uint64_t* edges, size_t* count) {
    const auto& before = reinterpret_cast<Node*>(number)->before;
    *count = std::min(*count, before.size());
    std::copy_n(before.begin(), *count, nodes);
    std::fill_n(edges, *count, 0);
    return 0;
}
int add_edges(uint64_t, const uint64_t* from, const uint64_t* to, const uint64_t*, size_t count) {
    for (size_t i = 0; i < count; ++i) reinterpret_cast<Node*>(to[i])->before.push_back(from[i]);
    return 0;
}
int remove_edges(uint64_t, const uint64_t* from, const uint64_t* to, const uint64_t*,
                 size_t count) {
    for (size_t i = 0; i < count; ++i) {
        if (std::erase(reinterpret_cast<Node*>(to[i])->before, from[i]) == 0) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return 0;
}
int node_type(uint64_t number, int* type) {
    constexpr int kTypes[] = {driver::kKernelNode, CU_GRAPH_NODE_TYPE_MEMCPY,
                              CU_GRAPH_NODE_TYPE_WAIT_EVENT, CU_GRAPH_NODE_TYPE_EVENT_RECORD};
    *type = kTypes[static_cast<int>(node_of(number)->kind)];
    return 0;
}
CUresult cuGraphAddEventWaitNode(CUgraphNode* made, CUgraph graph, const CUgraphNode* before,
                                 size_t count, CUevent) {
    const std::lock_guard held(lock);
    *made = reinterpret_cast<CUgraphNode>(add_event_node(graph, fake::Kind::kWait, before, count));
    return CUDA_SUCCESS;
}
CUresult cuGraphAddEventRecordNode(CUgraphNode* made, CUgraph graph, const CUgraphNode* before,
                                   size_t count, CUevent) {
    const std::lock_guard held(lock);
    *made =
        reinterpret_cast<CUgraphNode>(add_event_node(graph, fake::Kind::kRecord, before, count));
    return CUDA_SUCCESS;
}
int get_params(uint64_t number, driver::KernelNode* filled) {
    auto* node = reinterpret_cast<Node*>(number);
    CUcontext context = nullptr;
    cuCtxGetCurrent(&context);
    *filled = {};
    filled->function = reinterpret_cast<uint64_t>(node->function);
    filled->context = reinterpret_cast<uint64_t>(context);
    filled->parameters = node->parameters;
    return 0;
}
int set_params(uint64_t number, const driver::KernelNode* params) {
    auto* node = reinterpret_cast<Node*>(number);
    node->call = *static_cast<const KcclCall*>(params->parameters[0]);
    return 0;
}
CUresult cuGraphInstantiate(CUgraphExec* made, CUgraph graph, unsigned long long) {
    const std::lock_guard held(lock);
    counts["open launches"] += count_open(*reinterpret_cast<const Graph*>(graph));
    *made = reinterpret_cast<CUgraphExec>(graph);
    return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec made, CUstream) {
    const char* rank = std::getenv("PMI_RANK");
    static std::minstd_rand random(rank != nullptr ? std::atoi(rank) + 1 : 1);
    const auto& nodes = reinterpret_cast<const Graph*>(made)->nodes;
    std::set<uint64_t> done;
    ++running;
    while (done.size() < nodes.size()) {
        std::vector<const Node*> ready;
        for (const Node* node : nodes) {
            const bool is_ready = std::ranges::all_of(
                node->before, [&](uint64_t number) { return done.contains(number); });
            if (is_ready && !done.contains(reinterpret_cast<uint64_t>(node))) {
                ready.push_back(node);
            }
        }
        const Node* next = ready.at(random() % ready.size());
        fake::run(*next);
        done.insert(reinterpret_cast<uint64_t>(next));
    }
    --running;
    return CUDA_SUCCESS;
}

}  // extern "C"
