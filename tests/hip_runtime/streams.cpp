// Streams, each with a thread that does its work in order; copies and events.
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include <set>
#include <thread>

#include "runtime.h"

namespace hip_runtime {
namespace {

constexpr int kHipStreamNonBlocking = 1;
// Zeros over so much memory give the pages back, which is faster and takes no room.
constexpr uint64_t kManyBytes = 1 << 20;
constexpr uint64_t kPageBytes = 4096;

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, done = 0;  // how often
    uint64_t time_ns = 0;
};

struct Streams {
    std::mutex mutex;
    std::set<Stream*> all;
    std::vector<Stream*> defaults;  // by device
};

Streams& streams() {
    static Streams& it = *[] {
        auto* made = new Streams;
        for (int device = 0; device < num_devices(); ++device) {
            auto* stream = new Stream;
            stream->device = device;
            stream->waits_for_default = false;
            made->all.insert(stream);
            made->defaults.push_back(stream);
        }
        return made;
    }();
    return it;
}

thread_local Stream* running = nullptr;

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

void run(Stream* stream) {
    running = stream;
    std::unique_lock<std::mutex> lock(stream->mutex);
    while (true) {
        stream->changed.wait(lock, [stream] { return !stream->work.empty(); });
        const Work work = std::move(stream->work.front());
        stream->work.pop_front();
        lock.unlock();
        const int error = work();
        lock.lock();
        if (stream->error == 0) stream->error = error;
        ++stream->done;
        stream->changed.notify_all();
    }
}

// Returns its first error.
int wait_for(Stream& stream, uint64_t count) {
    std::unique_lock<std::mutex> lock(stream.mutex);
    stream.changed.wait(lock, [&] { return stream.done >= count; });
    return stream.error;
}

uint64_t enqueued_on(Stream& stream) {
    const std::lock_guard<std::mutex> lock(stream.mutex);
    return stream.enqueued;
}

void append(Stream& stream, Work work) {
    const std::lock_guard<std::mutex> lock(stream.mutex);
    if (!stream.has_thread) {
        stream.has_thread = true;
        std::thread(run, &stream).detach();
    }
    stream.work.push_back(std::move(work));
    ++stream.enqueued;
    stream.changed.notify_all();
}

// The streams for which work of this stream waits: the default stream for all that do not opt out,
// and these for the default stream.
std::vector<Stream*> before(const Stream& stream) {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    Stream* const first = streams().defaults[static_cast<size_t>(stream.device)];
    std::vector<Stream*> found;
    if (&stream == first) {
        for (Stream* each : streams().all) {
            if (each->device == stream.device && each->waits_for_default) found.push_back(each);
        }
    } else if (stream.waits_for_default) {
        found.push_back(first);
    }
    return found;
}

void copy(void* to, const void* from, size_t num_bytes) { memcpy(to, from, num_bytes); }

void fill(void* address, int byte, size_t num_bytes) {
    const auto begin = reinterpret_cast<uint64_t>(address);
    const uint64_t first = (begin + kPageBytes - 1) / kPageBytes * kPageBytes;
    const uint64_t last = (begin + num_bytes) / kPageBytes * kPageBytes;
    if (byte == 0 && num_bytes >= kManyBytes &&
        madvise(reinterpret_cast<void*>(first), last - first, MADV_REMOVE) == 0) {
        memset(address, 0, first - begin);
        memset(reinterpret_cast<void*>(last), 0, begin + num_bytes - last);
        return;
    }
    memset(address, byte, num_bytes);
}

int on_stream(uint64_t handle, Work work) {
    Stream* const stream = stream_of(handle);
    return stream == nullptr ? kHipErrorInvalidHandle : enqueue(*stream, std::move(work));
}

}  // namespace

Stream* stream_of(uint64_t handle) {
    const std::lock_guard<std::mutex> lock(streams().mutex);
    if (handle == 0) return streams().defaults[static_cast<size_t>(current_device())];
    auto* stream = reinterpret_cast<Stream*>(handle);
    return streams().all.count(stream) == 0 ? nullptr : stream;
}

Stream& running_stream() { return *running; }

int enqueue(Stream& stream, Work work) {
    if (stream.capture) {
        if (!stream.capture->is_valid) return kHipErrorStreamCaptureInvalidated;
        stream.capture->graph.nodes.push_back(std::move(work));
        return kHipSuccess;
    }
    for (Stream* other : before(stream)) {
        const uint64_t count = enqueued_on(*other);
        append(stream, [other, count] {
            wait_for(*other, count);
            return kHipSuccess;
        });
    }
    append(stream, std::move(work));
    return kHipSuccess;
}

int wait_for_device(int device) {
    std::vector<Stream*> all;
    {
        const std::lock_guard<std::mutex> lock(streams().mutex);
        for (Stream* each : streams().all) {
            if (each->device == device) all.push_back(each);
        }
    }
    int error = kHipSuccess;
    for (Stream* each : all) {
        const int its = wait_for(*each, enqueued_on(*each));
        if (error == kHipSuccess) error = its;
    }
    return error;
}

}  // namespace hip_runtime

using namespace hip_runtime;

// ---- Streams and copies -------------------------------------------------------------------------

HIP_API int hipStreamCreateWithFlags(Stream** handle, unsigned flags) {
    HIP_MAY_FAIL();
    auto* stream = new Stream;
    stream->device = current_device();
    stream->waits_for_default = (flags & kHipStreamNonBlocking) == 0;
    const std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.insert(stream);
    *handle = stream;
    return kHipSuccess;
}

// Its thread stays, with nothing to do.
HIP_API int hipStreamDestroy(uint64_t handle) {
    HIP_MAY_FAIL();
    Stream* const stream = stream_of(handle);
    if (stream == nullptr || handle == 0) return kHipErrorInvalidHandle;
    const std::lock_guard<std::mutex> lock(streams().mutex);
    streams().all.erase(stream);
    return kHipSuccess;
}

HIP_API int hipStreamSynchronize(uint64_t handle) {
    HIP_MAY_FAIL();
    Stream* const stream = stream_of(handle);
    if (stream == nullptr) return kHipErrorInvalidHandle;
    if (spoil(*stream)) return kHipErrorStreamCaptureUnsupported;
    return wait_for(*stream, enqueued_on(*stream));
}

HIP_API int hipStreamQuery(uint64_t handle) {
    HIP_MAY_FAIL();
    Stream* const stream = stream_of(handle);
    if (stream == nullptr) return kHipErrorInvalidHandle;
    if (spoil(*stream)) return kHipErrorStreamCaptureUnsupported;
    const std::lock_guard<std::mutex> lock(stream->mutex);
    if (stream->error != 0) return stream->error;
    return stream->done == stream->enqueued ? kHipSuccess : kHipErrorNotReady;
}

HIP_API int hipDeviceSynchronize() {
    HIP_MAY_FAIL();
    if (is_forbidden_by_capture()) return kHipErrorStreamCaptureUnsupported;
    return wait_for_device(current_device());
}

HIP_API int hipMemcpyHtoDAsync(void* to, const void* from, size_t num_bytes, uint64_t stream) {
    HIP_MAY_FAIL();
    // As from pageable memory: the source may go when the call returns.
    const std::string data(static_cast<const char*>(from), num_bytes);
    return on_stream(stream, [to, data] {
        copy(to, data.data(), data.size());
        return kHipSuccess;
    });
}

HIP_API int hipMemcpyDtoHAsync(void* to, const void* from, size_t num_bytes, uint64_t stream) {
    HIP_MAY_FAIL();
    return on_stream(stream, [=] {
        copy(to, from, num_bytes);
        return kHipSuccess;
    });
}

HIP_API int hipMemcpyDtoDAsync(void* to, const void* from, size_t num_bytes, uint64_t stream) {
    HIP_MAY_FAIL();
    return on_stream(stream, [=] {
        copy(to, from, num_bytes);
        return kHipSuccess;
    });
}

HIP_API int hipMemsetD8Async(void* address, unsigned char byte, size_t num_bytes, uint64_t stream) {
    HIP_MAY_FAIL();
    return on_stream(stream, [=] {
        fill(address, byte, num_bytes);
        return kHipSuccess;
    });
}

// ---- Events -------------------------------------------------------------------------------------

HIP_API int hipEventCreateWithFlags(Event** event, unsigned) {
    HIP_MAY_FAIL();
    *event = new Event;
    return kHipSuccess;
}

HIP_API int hipEventRecord(Event* event, uint64_t stream) {
    HIP_MAY_FAIL();
    {
        const std::lock_guard<std::mutex> lock(event->mutex);
        ++event->recorded;
    }
    return on_stream(stream, [event] {
        const std::lock_guard<std::mutex> lock(event->mutex);
        ++event->done;
        event->time_ns = now_ns();
        event->changed.notify_all();
        return kHipSuccess;
    });
}

HIP_API int hipEventSynchronize(Event* event) {
    HIP_MAY_FAIL();
    std::unique_lock<std::mutex> lock(event->mutex);
    event->changed.wait(lock, [event] { return event->done == event->recorded; });
    return kHipSuccess;
}

HIP_API int hipEventQuery(Event* event) {
    HIP_MAY_FAIL();
    const std::lock_guard<std::mutex> lock(event->mutex);
    return event->done == event->recorded ? kHipSuccess : kHipErrorNotReady;
}

HIP_API int hipStreamWaitEvent(uint64_t stream, Event* event, unsigned) {
    HIP_MAY_FAIL();
    uint64_t wanted = 0;
    {
        const std::lock_guard<std::mutex> lock(event->mutex);
        wanted = event->recorded;
    }
    return on_stream(stream, [event, wanted] {
        std::unique_lock<std::mutex> lock(event->mutex);
        event->changed.wait(lock, [event, wanted] { return event->done >= wanted; });
        return kHipSuccess;
    });
}

HIP_API int hipEventElapsedTime(float* ms, Event* begin, Event* end) {
    HIP_MAY_FAIL();
    const std::scoped_lock lock(begin->mutex, end->mutex);
    if (begin->recorded == 0 || end->recorded == 0) return kHipErrorInvalidHandle;
    if (begin->done != begin->recorded || end->done != end->recorded) return kHipErrorNotReady;
    *ms = static_cast<float>(static_cast<double>(end->time_ns - begin->time_ns) * 1e-6);
    return kHipSuccess;
}

// Its stream may still use it, so it stays.
HIP_API int hipEventDestroy(Event*) {
    HIP_MAY_FAIL();
    return kHipSuccess;
}
