// The tags of messages (messages.cpp). Those that callers give are not negative.
#pragma once

#include "host.h"

namespace kccl::host {

// The tag of a receive that takes a message with any tag of a caller's.
constexpr int32_t kAnyTag = -1;
// The tag of the messages of calls with parts (parts.inc) is this number less the channel.
constexpr int32_t kFirstTagOfParts = -2;

constexpr int32_t tag_of_parts(int32_t channel) { return kFirstTagOfParts - channel; }

constexpr bool is_of_parts(int32_t tag) { return tag <= kFirstTagOfParts; }

// Returns the inverse of tag_of_parts().
constexpr int32_t channel_of_parts(int32_t tag) { return kFirstTagOfParts - tag; }

// Tells whether a receive that asks for the tag `asked` takes a message with the tag `tag`.
constexpr bool takes_tag(int32_t asked, int32_t tag) {
    return asked == tag || (asked == kAnyTag && tag >= 0);
}

}  // namespace kccl::host
