// Sends the messages for one peer: see messages.cpp.
#pragma once

#include "../include/kccl/targets/host_idle.h"
#include "far_link.h"

namespace kccl::host {
namespace {

// A bit that a receiver sets beside the ticket in its word: it may not read the sender's memory.
constexpr uint32_t kRefused = 0x80000000u;

// KcclMessage.state.
enum State : uint32_t {
    kQueued = 0,    // sending: its first record is not in the ring yet. Receiving: nothing has come
    kReadable = 1,  // sending: as kQueued, and the peer may read the message where it is
    kOffered = 2,   // sending: its address is in the ring. Receiving: its bytes are sent again
};

// A list of messages in the order in which they were added.
class Queue {
  public:
    bool is_empty() const { return first_ == nullptr; }
    KcclMessage* first() const { return first_; }
    static KcclMessage* after(const KcclMessage* message) {
        return reinterpret_cast<KcclMessage*>(message->next);
    }
    void add(KcclMessage* message) {
        message->next = 0;
        if (first_ == nullptr) {
            first_ = message;
        } else {
            last_->next = reinterpret_cast<uint64_t>(message);
        }
        last_ = message;
    }
    void remove(const KcclMessage* message) {
        KcclMessage* before = nullptr;
        for (KcclMessage* each = first_; each != nullptr; before = each, each = after(each)) {
            if (each != message) continue;
            if (before == nullptr) {
                first_ = after(each);
            } else {
                before->next = each->next;
            }
            if (last_ == message) last_ = before;
            return;
        }
    }

  private:
    KcclMessage* first_ = nullptr;
    KcclMessage* last_ = nullptr;
};

// The messages that this rank sends to one peer.
class Outbox {
  public:
    // may_attach: the peer's process may read this one's memory. far: as for WayOut.
    Outbox(const KcclDeviceComm& comm, int peer, bool may_attach, FarLink* far)
        : comm_(comm), peer_(peer), may_attach_(may_attach), writer_(comm, peer, far) {}

    void add(KcclMessage* message) {
        const bool is_long = message->num_bytes > kMostPieceBytes;
        if (is_long && may_attach_ && is_readable(message)) message->state = kReadable;
        sends_.add(message);
    }

    // Sends as much as is possible now, and completes the sends that the peer has read.
    void move() {
        if (!offered_.is_empty()) hear_tickets();
        if (!sends_.is_empty()) send_some();
    }

  private:
    // Tells whether other processes can read the message. Tries this with its first and last byte.
    bool is_readable(const KcclMessage* message) const {
        const uint64_t context = reinterpret_cast<const KcclState*>(comm_.state)->idle_context;
        const uint64_t last = message->address + message->num_bytes - 1;
        uint8_t byte;
        return kccl_host_read_peer(context, comm_.rank, &byte, message->address, 1) == 0 &&
               kccl_host_read_peer(context, comm_.rank, &byte, last, 1) == 0;
    }

    // Puts records of the messages into the peer's ring, in order, until that is full.
    void send_some() {
        while (KcclMessage* message = sends_.first()) {
            const bool is_first = message->moved == 0;
            const uint32_t index = free_ticket();
            // If no ticket is free, a long message goes in pieces, so that those behind it do not
            // wait.
            if (is_first && message->state == kReadable && index < kKcclMessageTickets) {
                if (!offer(message, index)) return;
                continue;
            }
            const uint64_t rest = message->num_bytes - message->moved;
            const auto piece =
                static_cast<uint32_t>(rest < kMostPieceBytes ? rest : kMostPieceBytes);
            const RecordKind kind = !is_first                    ? RecordKind::kMore
                                    : message->state == kOffered ? RecordKind::kResent
                                                                 : RecordKind::kBytes;
            const RecordHead head = {0, message->num_bytes, 0, message->tag, message->ticket};
            const auto* from = reinterpret_cast<const uint8_t*>(message->address);
            if (!writer_.put(head, kind, from + message->moved, piece)) return;
            message->moved += piece;
            if (message->moved < message->num_bytes) continue;
            sends_.remove(message);
            message->is_done = 1;
        }
    }

    // Returns the index of a free ticket; kKcclMessageTickets if none is free.
    uint32_t free_ticket() const {
        uint32_t index = 0;
        while (index < kKcclMessageTickets && (busy_tickets_ >> index & 1u) != 0) ++index;
        return index;
    }

    // Puts the address of a message into the ring, with the free ticket of this index. Returns
    // false if the ring has no room.
    bool offer(KcclMessage* message, uint32_t index) {
        // A ticket is never 0, which is the first value of the words.
        constexpr uint32_t kCounts = kRefused / kKcclMessageTickets - 1;
        const uint32_t ticket = (ticket_count_ % kCounts + 1) * kKcclMessageTickets + index;
        const RecordHead head = {0, message->num_bytes, message->address, message->tag, ticket};
        if (!writer_.put(head, RecordKind::kAddress, nullptr, 0)) return false;
        ++ticket_count_;
        busy_tickets_ |= 1u << index;
        message->ticket = ticket;
        sends_.remove(message);
        offered_.add(message);
        return true;
    }

    // Completes the sends that the peer has read. A message that the peer may not read is queued
    // again, and its bytes go through the ring.
    void hear_tickets() {
        for (KcclMessage* message = offered_.first(); message != nullptr;) {
            KcclMessage* next = Queue::after(message);
            const uint32_t index = message->ticket % kKcclMessageTickets;
            const uint32_t word = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(
                ticket_word(comm_, comm_.rank, peer_, index));
            if ((word & ~kRefused) == message->ticket) {
                busy_tickets_ &= ~(1u << index);
                offered_.remove(message);
                if ((word & kRefused) != 0) {
                    message->state = kOffered;
                    sends_.add(message);
                } else {
                    message->is_done = 1;
                }
            }
            message = next;
        }
    }

    const KcclDeviceComm& comm_;
    const int peer_;
    const bool may_attach_;
    WayOut writer_;
    Queue sends_;                // messages of which not all is in the ring yet
    Queue offered_;              // messages whose ticket has not come back
    uint32_t busy_tickets_ = 0;  // a bit each
    uint32_t ticket_count_ = 0;
};

}  // namespace
}  // namespace kccl::host
