// Sets how a thread on a CPU rounds, by the CPU's control word. Programs change this word
// (torch.set_flush_denormal, fesetround, libraries that were linked with -ffast-math), and a thread
// inherits it from the thread that starts it. Two ranks that round differently would get different
// bits.
#pragma once

#include <stdint.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

// Marks a function as always inlined, as KCCL_DEVICE in platform.cuh does: files that are compiled
// for different instruction sets must share no function.
#define KCCL_ALWAYS_INLINE inline __attribute__((always_inline))

namespace kccl::host {

// While such an object lives, its thread rounds to nearest, keeps denormals and traps nothing. If
// that is so already, it costs one read of the control word, some 5 ns. A call makes the object
// while its packets are under way, which hides that time.
class DefaultFloats {
  public:
    KCCL_ALWAYS_INLINE DefaultFloats() : before_(read()) {
        if ((before_ & kControls) != kDefault) write((before_ & ~kControls) | kDefault);
    }
    KCCL_ALWAYS_INLINE ~DefaultFloats() {
        if ((before_ & kControls) != kDefault) write(before_);
    }
    DefaultFloats(const DefaultFloats&) = delete;
    DefaultFloats& operator=(const DefaultFloats&) = delete;

  private:
#if defined(__x86_64__)
    using Word = uint32_t;
    // kControls: the bits of MXCSR, except the flags that say which exceptions have happened.
    // kDefault: rounds to nearest, keeps denormals, masks all exceptions.
    static constexpr Word kControls = 0xffc0, kDefault = 0x1f80;
    KCCL_ALWAYS_INLINE static Word read() { return _mm_getcsr(); }
    KCCL_ALWAYS_INLINE static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
    using Word = uint64_t;
    // All bits of FPCR. Zero rounds to nearest, keeps denormals and traps nothing.
    static constexpr Word kControls = ~Word{0}, kDefault = 0;
#if defined(__clang__)
    KCCL_ALWAYS_INLINE static Word read() { return __builtin_arm_rsr64("fpcr"); }
    KCCL_ALWAYS_INLINE static void write(Word word) { __builtin_arm_wsr64("fpcr", word); }
#else
    KCCL_ALWAYS_INLINE static Word read() { return __builtin_aarch64_get_fpcr(); }
    KCCL_ALWAYS_INLINE static void write(Word word) {
        __builtin_aarch64_set_fpcr(static_cast<uint32_t>(word));
    }
#endif
#else
    // On other CPUs the control word is left as it is.
    using Word = uint32_t;
    static constexpr Word kControls = 0, kDefault = 0;
    KCCL_ALWAYS_INLINE static Word read() { return 0; }
    KCCL_ALWAYS_INLINE static void write(Word) {}
#endif

    const Word before_;
};

}  // namespace kccl::host
