// The tags of messages (messages.h). Those that callers give are not negative.
#pragma once

#include "host.h"

namespace kccl::host {

// The tag of a receive that takes a message with any tag of a caller's.
constexpr int32_t kAnyTag = -1;
// A collective may send its parts as messages (parts.inc, chain.inc). These messages have a tag for
// each channel and kernel: this number, or one below it.
constexpr int32_t kFirstTagOfParts = -2;

constexpr int32_t tag_of_parts(int32_t channel, int32_t kernel) {
    return kFirstTagOfParts - (channel * kKcclNumKernels + kernel);
}

constexpr bool is_of_parts(int32_t tag) { return tag <= kFirstTagOfParts; }

// Both return what tag_of_parts() was given.
constexpr int32_t channel_of_parts(int32_t tag) {
    return (kFirstTagOfParts - tag) / kKcclNumKernels;
}
constexpr int32_t kernel_of_parts(int32_t tag) {
    return (kFirstTagOfParts - tag) % kKcclNumKernels;
}

// Tells whether a receive that asks for the tag `asked` takes a message with the tag `tag`.
constexpr bool takes_tag(int32_t asked, int32_t tag) {
    return asked == tag || (asked == kAnyTag && tag >= 0);
}

}  // namespace kccl::host
