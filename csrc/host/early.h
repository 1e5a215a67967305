// Keeps "early" messages, which have come before a receive asked for them: see messages.h.
#pragma once

#include <stdlib.h>

#include "../include/kccl/messages.cuh"
#include "host.h"

namespace kccl::host {
namespace {

// An early message.
struct Early {
    Early* next;
    RecordHead head;      // of the message's first record
    uint64_t moved;       // how many of its bytes have come
    KcclMessage* wanted;  // the receive that has asked for it; null if none has
    uint8_t bytes[];      // the message's bytes; empty if only the bytes' address has come
};

// Early messages of one source, in the order in which they came.
class EarlyList {
  public:
    EarlyList() = default;
    EarlyList(const EarlyList&) = delete;
    EarlyList& operator=(const EarlyList&) = delete;
    ~EarlyList() {
        while (first_ != nullptr) free(remove(&first_));
    }

    Early* first() const { return first_; }
    Early** begin() { return &first_; }
    // Adds an entry for a message, with room for its bytes, which the caller copies as they come.
    // head, mark: of the message's first record. Returns null if there is no memory.
    Early* keep(const RecordHead& head, uint64_t mark) {
        const bool is_address = kind_of(mark) == RecordKind::kAddress;
        auto* early =
            static_cast<Early*>(malloc(sizeof(Early) + (is_address ? 0 : head.num_bytes)));
        if (early == nullptr) return nullptr;
        early->head = head;
        early->head.mark = mark;
        early->moved = 0;
        early->wanted = nullptr;
        add(early);
        return early;
    }
    // Removes the message to which *link points from the list, and returns it; the caller frees it.
    // `link` is begin(), or the address of the member `next` of the message before.
    Early* remove(Early** link) {
        Early* early = *link;
        *link = early->next;
        if (*link == nullptr) end_ = link;
        return early;
    }

  private:
    void add(Early* early) {
        early->next = nullptr;
        *end_ = early;
        end_ = &early->next;
    }

    Early* first_ = nullptr;
    Early** end_ = &first_;
};

}  // namespace
}  // namespace kccl::host
