// Modules and launches. A module's code is an ELF file for AMD's GPUs as compile_sim.py makes it:
// metadata in a note, and where the instructions would be, a library of kernels for the simulator.
//
// All launches of this process run on one simulated machine, with warps of 64 and gfx942's memory
// model. To the machine each stream is a rank. Between processes memory is the host's: a machine
// sees what others write when its threads look again.
#include <dlfcn.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>

#include "../../csrc/include/kccl/targets/sim_device.h"
#include "../../csrc/sim/types.h"
#include "runtime.h"

namespace hip_runtime {

struct Shapes {
    uint32_t num_bytes, alignment;
};

// A kernel on the device whose module has it.
struct Function {
    void (*entry)(const void*);
    std::vector<Shapes> parameters;
    int device;
};

namespace {

constexpr int kStreams = 128;  // that launch
constexpr int kHipFuncAttributeMaxThreadsPerBlock = 0;
constexpr int kHipFuncAttributeSharedSizeBytes = 1;
constexpr int kHipFuncAttributeNumRegs = 4;

struct Module {
    void* library;
    int device;
};

// What a GPU's kernel reads and writes in its host's mailbox.
uint32_t look_at_mailbox(uint64_t context, uint32_t, uint32_t* gone) {
    if (context == 0) return kKcclOk;
    auto* mailbox = reinterpret_cast<KcclMailbox*>(context);
    *gone = __atomic_load_n(&mailbox->gone, __ATOMIC_RELAXED);
    const uint32_t interrupted = __atomic_load_n(&mailbox->interrupted, __ATOMIC_RELAXED);
    return interrupted != 0 ? kKcclInterrupted : kKcclOk;
}

void write_mailbox(uint64_t context, uint32_t status, const void* record) {
    if (context == 0) return;
    auto* mailbox = reinterpret_cast<KcclMailbox*>(context);
    memcpy(&mailbox->record, record, sizeof(KcclRecord));
    __atomic_store_n(&mailbox->status, status, __ATOMIC_RELEASE);
}

// The host's, because ranks are real threads and processes. And the machine's own clock stands
// still for a kernel that only looks at it.
uint64_t host_clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

const KcclSimEngine* engine() {
    static const KcclSimEngine table = [] {
        KcclSimEngine made = *static_cast<const KcclSimEngine*>(kccl_sim_engine_table());
        made.idle = look_at_mailbox;
        made.tell_host = write_mailbox;
        made.clock_ns = host_clock_ns;
        return made;
    }();
    return &table;
}

KcclSimMachine* machine() {
    static KcclSimMachine* const it = [] {
        const char* seed = getenv("HIP_RUNTIME_SEED");
        KcclSimSettings settings = {};
        settings.world_size = kStreams;
        settings.warp_size = kWarpSize;
        settings.model = kKcclSimGfx942;
        settings.is_weak = 1;
        // Benches start kernels on streams that store the same word: harmless, but a race.
        settings.checks = getenv("HIP_RUNTIME_UNCHECKED") == nullptr ? 1 : 0;
        settings.seed = seed == nullptr ? 0 : strtoull(seed, nullptr, 10);
        settings.max_steps = uint64_t{1} << 40;
        KcclSimMachine* made = kccl_sim_create(&settings);
        // Streams without a launch do not keep the others from moving.
        for (int rank = 0; rank < kStreams; ++rank) kccl_sim_set_outside(made, rank, 1);
        return made;
    }();
    return it;
}

// 0: the machine has found nothing.
int report_finding() {
    if (kccl_sim_num_findings(machine()) == 0) return 0;
    static std::atomic<bool> is_reported = false;
    if (!is_reported.exchange(true)) {
        const KcclSimFinding found = kccl_sim_finding(machine(), 0);
        Dl_info where = {};
        dladdr(reinterpret_cast<void*>(found.place.site), &where);
        fprintf(stderr, "HIP runtime of the tests: finding %u at address %#lx, in %s\n", found.kind,
                static_cast<unsigned long>(found.address),
                where.dli_sname != nullptr ? where.dli_sname : "a kernel");
    }
    return kHipErrorLaunchFailure;
}

int launch(const Function& function, const Shape& shape, const std::vector<uint64_t>& arguments) {
    static std::atomic<int> next_rank = 0;
    Stream& stream = running_stream();
    if (function.device != stream.device) return kHipErrorInvalidHandle;
    if (stream.machine_rank < 0) stream.machine_rank = next_rank++;
    if (stream.machine_rank >= kStreams) return kHipErrorOutOfMemory;
    KcclSimLaunch launch = {};
    launch.entry = function.entry;
    launch.arguments = arguments.data();
    launch.argument_bytes = arguments.size() * sizeof(uint64_t);
    launch.num_blocks = shape.grid[0];
    launch.threads_per_block = shape.block[0];
    launch.shared_bytes = shape.shared_bytes;
    launch.rank = stream.machine_rank;
    // From "outside" it knows what other streams' launches have done.
    kccl_sim_set_outside(machine(), stream.machine_rank, 0);
    const int error = kccl_sim_launch(machine(), &launch);
    kccl_sim_set_outside(machine(), stream.machine_rank, 1);
    return error == 0 ? kHipSuccess : report_finding();
}

// Loading waits for the kernels that run, as drivers do: for those of its own device where
// HIP_RUNTIME_LOADS_WAIT is "device", and for those of every device where it is "all".
void wait_before_load() {
    const char* const told = getenv("HIP_RUNTIME_LOADS_WAIT");
    if (told == nullptr) return;
    const bool for_all = strcmp(told, "all") == 0;
    for (int device = 0; device < num_devices(); ++device) {
        if (for_all || device == current_device()) wait_for_device(device);
    }
}

// Null: there is no such library in the image.
void* load(const uint8_t* image) {
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof(header));
    if (memcmp(header.e_ident, ELFMAG, SELFMAG) != 0) return nullptr;
    for (int i = 0; i < header.e_phnum; ++i) {
        Elf64_Phdr part;
        memcpy(&part, image + header.e_phoff + i * sizeof(part), sizeof(part));
        if (part.p_type != PT_LOAD) continue;
        const int fd = memfd_create("kernels", MFD_CLOEXEC);
        const auto wanted = static_cast<ssize_t>(part.p_filesz);
        if (fd < 0 || write(fd, image + part.p_offset, part.p_filesz) != wanted) return nullptr;
        // The loader knows files by their name, so each needs its own.
        const std::string path = "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(fd);
        void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) fprintf(stderr, "HIP runtime of the tests: %s\n", dlerror());
        return library;
    }
    return nullptr;
}

}  // namespace

void machine_knows(uint64_t address, uint64_t num_bytes) {
    kccl_sim_add_window(machine(), 0, address, num_bytes);
}

// A KcclState may have begun here: the next one that does counts its calls anew.
void machine_forgets(uint64_t address) {
    kccl_sim_remove_window(machine(), address);
    kccl_sim_forget_calls(machine(), address);
}

int kernel_work(Function* function, const Shape& shape, void** arguments, Work* work) {
    const bool is_flat =
        shape.grid[1] == 1 && shape.grid[2] == 1 && shape.block[1] == 1 && shape.block[2] == 1;
    if (!is_flat || shape.grid[0] == 0 || shape.block[0] == 0 ||
        shape.block[0] > static_cast<uint32_t>(kMostThreads) ||
        shape.block[0] % static_cast<uint32_t>(kWarpSize) != 0 ||
        shape.shared_bytes > static_cast<uint32_t>(kSharedBytes)) {
        return kHipErrorInvalidConfiguration;
    }
    uint64_t end = 0;
    for (const Shapes& each : function->parameters) {
        end = (end + each.alignment - 1) / each.alignment * each.alignment + each.num_bytes;
    }
    std::vector<uint64_t> data((end + 7) / 8 + 1);
    uint64_t at = 0;
    for (size_t i = 0; i < function->parameters.size(); ++i) {
        const Shapes& each = function->parameters[i];
        at = (at + each.alignment - 1) / each.alignment * each.alignment;
        memcpy(reinterpret_cast<uint8_t*>(data.data()) + at, arguments[i], each.num_bytes);
        at += each.num_bytes;
    }
    *work = [function, shape, data = std::move(data)] { return launch(*function, shape, data); };
    return kHipSuccess;
}

}  // namespace hip_runtime

using namespace hip_runtime;

HIP_API int hipModuleLoadData(Module** module, const void* image) {
    HIP_MAY_FAIL();
    if (is_forbidden_by_capture()) return kHipErrorStreamCaptureUnsupported;
    wait_before_load();
    void* library = load(static_cast<const uint8_t*>(image));
    if (library == nullptr) return kHipErrorInvalidImage;
    const auto attach =
        reinterpret_cast<void (*)(const KcclSimEngine*)>(dlsym(library, "kccl_sim_attach"));
    attach(engine());
    *module = new Module{library, current_device()};
    return kHipSuccess;
}

HIP_API int hipModuleGetFunction(Function** function, Module* module, const char* name) {
    HIP_MAY_FAIL();
    // As compile_sim.py names them.
    const std::string entry = name,
                      shapes = "kccl_sim_shapes_" + entry.substr(entry.rfind('_') + 1);
    auto* of = reinterpret_cast<const Shapes* (*)()>(dlsym(module->library, shapes.c_str()));
    void* code = dlsym(module->library, name);
    if (code == nullptr || of == nullptr) return kHipErrorNotFound;
    auto* made = new Function{reinterpret_cast<void (*)(const void*)>(code), {}, module->device};
    for (const Shapes* each = of(); each->alignment != 0; ++each) made->parameters.push_back(*each);
    *function = made;
    return kHipSuccess;
}

HIP_API int hipFuncGetAttribute(int* value, int attribute, Function*) {
    HIP_MAY_FAIL();
    // The compiler for CPUs does not tell what a kernel's code would need on a GPU.
    switch (attribute) {
        case kHipFuncAttributeMaxThreadsPerBlock: *value = kMostThreads; break;
        case kHipFuncAttributeSharedSizeBytes: *value = 0; break;
        case kHipFuncAttributeNumRegs: *value = kRegisters; break;
        default: return kHipErrorInvalidValue;
    }
    return kHipSuccess;
}

HIP_API int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int* count, Function*, int threads,
                                                               size_t shared_bytes) {
    HIP_MAY_FAIL();
    if (threads <= 0 || threads > kMostThreads) return kHipErrorInvalidValue;
    const int by_threads = kThreadsOfMultiprocessor / threads;
    const int by_shared =
        shared_bytes == 0 ? by_threads : static_cast<int>(kSharedBytes / shared_bytes);
    *count = std::min(by_threads, by_shared);
    return kHipSuccess;
}

HIP_API int hipModuleLaunchKernel(Function* function, unsigned grid_x, unsigned grid_y,
                                  unsigned grid_z, unsigned block_x, unsigned block_y,
                                  unsigned block_z, unsigned shared_bytes, uint64_t handle,
                                  void** arguments, void**) {
    HIP_MAY_FAIL();
    Stream* const stream = stream_of(handle);
    if (stream == nullptr) return kHipErrorInvalidHandle;
    Work work;
    const Shape shape = {{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes};
    const int error = kernel_work(function, shape, arguments, &work);
    return error == kHipSuccess ? enqueue(*stream, std::move(work)) : error;
}
