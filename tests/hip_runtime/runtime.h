// A HIP runtime for tests, on the CPU: device memory is host memory, and the simulator of csrc/sim
// runs the kernels. It is built as libamdhip64.so, so that hip-python loads it like AMD's.
//
//   devices.cpp   devices, their attributes, peer access, and which calls are told to fail
//   memory.cpp    device memory, pinned memory, handles, memory with a mapping of its own
//   streams.cpp   streams, copies, events
//   graphs.cpp    captures and graphs
//   kernels.cpp   modules, functions, launches on the simulated machine
//   rtc.cpp       libhiprtc.so: compiles for the simulator
//
// Functions have AMD's names and signatures. Handles are pointers to the structs below. Nothing is
// destroyed at the end of the process, because a stream's thread may still run.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define HIP_API extern "C" __attribute__((visibility("default")))
// At the beginning of each function: returns the error that the test wants.
#define HIP_MAY_FAIL() \
    if (const int told = hip_runtime::told_to_fail(__func__); told != 0) return told

namespace hip_runtime {

// hipError_t; tests/hip/test_table.py compares these numbers with hip-python's.
constexpr int kHipSuccess = 0;
constexpr int kHipErrorInvalidValue = 1;
constexpr int kHipErrorOutOfMemory = 2;
constexpr int kHipErrorInvalidConfiguration = 9;
constexpr int kHipErrorNoDevice = 100;
constexpr int kHipErrorInvalidDevice = 101;
constexpr int kHipErrorInvalidImage = 200;
constexpr int kHipErrorInvalidContext = 201;
constexpr int kHipErrorInvalidHandle = 400;
constexpr int kHipErrorNotFound = 500;
constexpr int kHipErrorNotReady = 600;
constexpr int kHipErrorPeerAccessAlreadyEnabled = 704;
constexpr int kHipErrorLaunchFailure = 719;
constexpr int kHipErrorNotSupported = 801;
constexpr int kHipErrorStreamCaptureUnsupported = 900;
constexpr int kHipErrorStreamCaptureInvalidated = 901;

// An MI300X.
constexpr int kWarpSize = 64;
constexpr int kMultiprocessors = 304;
constexpr int kMostThreads = 1024;
// Each thread of any kernel has so many.
constexpr int kRegisters = 128;
constexpr int kThreadsOfMultiprocessor = 2048;
constexpr int kSharedBytes = 65536;

// The code that a test wants function `name` to return; 0: it works.
int told_to_fail(const char* name);

int num_devices();
// The device of the calling thread.
int current_device();

// Whether a stream that this thread captures forbids calls such as an allocation. Such a call ends
// the capture.
bool is_forbidden_by_capture();

// Work of a stream. It may run several times, as part of a graph. Returns a hipError_t.
using Work = std::function<int()>;

struct Graph {
    std::vector<Work> nodes;
};

struct Capture {
    Graph graph;
    int mode = 0;
    bool is_valid = true;
};

// A stream has a thread, which starts with the first work and never ends.
struct Stream {
    int device = 0;
    bool waits_for_default = true;
    int machine_rank = -1;  // kernels.cpp
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<Work> work;
    uint64_t enqueued = 0, done = 0;
    int error = 0;  // the first one of its work
    bool has_thread = false;
    std::unique_ptr<Capture> capture;
};

// Ends a capture that a forbidden call has spoiled. True: there is one.
bool spoil(Stream& stream);

// The stream of a handle on the current device; null if there is none. 0 is the default stream.
Stream* stream_of(uint64_t handle);
// The stream whose work this thread does.
Stream& running_stream();
// Appends work, or captures it. Returns a hipError_t.
int enqueue(Stream& stream, Work work);
// Waits for all work of a device; returns the first error of its streams.
int wait_for_device(int device);

// Tells the simulated machine that memory is there, which outlives launches; and that it is gone.
void machine_knows(uint64_t address, uint64_t num_bytes);
void machine_forgets(uint64_t address);

struct Function;
struct Shape {
    uint32_t grid[3], block[3], shared_bytes;
};
// *work runs a kernel with a copy of its arguments. Returns a hipError_t.
int kernel_work(Function* function, const Shape& shape, void** arguments, Work* work);

}  // namespace hip_runtime
