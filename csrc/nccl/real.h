// The NCCL that stands behind this library.
#pragma once

#include <atomic>
#include <string>
#include <type_traits>

#include "api.h"

namespace kccl::nccl {

// Returns a function of the NCCL behind; null if it has none of this name, or if there is no NCCL
// yet. Says so on standard error.
void* real_function(const char* name);

// Returns the file of the NCCL behind; "?" if it is not known.
std::string real_file();

// While one lives, this thread is in a function of the NCCL behind. What that calls of its own
// functions comes to this library first, and is none of the program's calls.
class InReal {
  public:
    InReal() { ++depth(); }
    ~InReal() { --depth(); }
    InReal(const InReal&) = delete;
    InReal& operator=(const InReal&) = delete;
    static bool is_here() { return depth() > 0; }

  private:
    static int& depth() {
        static thread_local int number = 0;
        return number;
    }
};

// Returns the text of this thread's last error if KCCL reported it. Returns "" if NCCL did, or if
// there was none.
std::string& own_error();

// Returns NCCL's result for the exception that is being handled, and notes its words. No exception
// may leave a function of NCCL's.
ncclResult_t caught();

// Calls a function of the NCCL behind, which has the type of this library's own.
template <class Result, class... Parameters>
Result call_real(void* function, Result (*)(Parameters...),
                 std::type_identity_t<Parameters>... arguments) {
    const InReal here;
    const auto call = reinterpret_cast<Result (*)(Parameters...)>(function);
    if constexpr (std::is_same_v<Result, ncclResult_t>) {
        const ncclResult_t result = call != nullptr ? call(arguments...) : ncclSystemError;
        if (result != ncclSuccess && result != ncclInProgress) own_error().clear();
        return result;
    } else if (call != nullptr) {
        return call(arguments...);
    } else if constexpr (!std::is_void_v<Result>) {
        return "the NCCL behind libkccl_nccl.so has no such function";
    }
}

}  // namespace kccl::nccl

// Calls the function of this name of the NCCL behind, as in KCCL_REAL(ncclCommDestroy, comm).
#define KCCL_REAL(name, ...)                                                    \
    [&] {                                                                       \
        static std::atomic<void*> found;                                        \
        void* real = found.load(std::memory_order_relaxed);                     \
        if (real == nullptr) found = real = ::kccl::nccl::real_function(#name); \
        return ::kccl::nccl::call_real(real, &name __VA_OPT__(, ) __VA_ARGS__); \
    }()
