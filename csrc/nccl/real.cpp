// Finds the NCCL behind this library.
#include "real.h"

#include <dlfcn.h>

#include <cstdio>
#include <exception>

namespace kccl::nccl {

namespace {

constexpr const char* kName = "libnccl.so.2";

// A program that is linked with NCCL has it behind this library. PyTorch loads it for itself alone,
// where RTLD_NEXT does not look, but the loader knows it by its name. Otherwise it is loaded.
void* open_real() {
    if (void* loaded = dlopen(kName, RTLD_LAZY | RTLD_NOLOAD); loaded != nullptr) return loaded;
    if (dlsym(RTLD_NEXT, "ncclCommInitRank") != nullptr) return RTLD_NEXT;
    void* opened = dlopen(kName, RTLD_LAZY | RTLD_LOCAL);
    if (opened == nullptr) std::fprintf(stderr, "kccl: there is no NCCL: %s\n", dlerror());
    return opened;
}

// Tells whether a function is this library's own: somebody has given it the name of NCCL's.
bool is_own(void* function) {
    Dl_info found = {}, own = {};
    return dladdr(function, &found) != 0 && dladdr(reinterpret_cast<void*>(&is_own), &own) != 0 &&
           found.dli_fbase == own.dli_fbase;
}

}  // namespace

std::string& own_error() {
    static thread_local std::string words;
    return words;
}

ncclResult_t caught() {
    try {
        throw;
    } catch (ncclResult_t result) {
        return result;
    } catch (const std::exception& error) {
        own_error() = error.what();
        return ncclInternalError;
    }
}

void* real_function(const char* name) {
    static std::atomic<void*> known;
    void* real = known.load();
    // The program may load NCCL later.
    if (real == nullptr) known = real = open_real();
    void* found = real == nullptr ? nullptr : dlsym(real, name);
    if (found != nullptr && is_own(found)) found = nullptr;
    if (found == nullptr) std::fprintf(stderr, "kccl: the NCCL behind has no %s\n", name);
    return found;
}

std::string real_file() {
    Dl_info found = {};
    void* function = real_function("ncclGetVersion");
    const bool is_known = function != nullptr && dladdr(function, &found) != 0;
    return is_known && found.dli_fname != nullptr ? found.dli_fname : "?";
}

}  // namespace kccl::nccl
