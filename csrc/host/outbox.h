// Sends the messages for one peer: see messages.h.
#pragma once

#include "../include/kccl/targets/host_idle.h"
#include "routes.h"

namespace kccl::host {
namespace {

// A receiver sets this bit in the ticket that it returns (writes into the sender's scratch) if it
// could not read the message from the sender's memory.
constexpr uint32_t kRefused = 0x80000000u;

// The values of KcclMessage.state.
enum State : uint32_t {
    kQueued = 0,    // the first state; only long messages have the others
    kReadable = 1,  // a send that may go by its address: the peer may read this process's memory
    kOffered = 2,   // a send or receive whose bytes the receiver could not read by their address,
                    // so that they go through the ring
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

// How a rank reads the memory of other ranks' processes on its node.
class Memories {
  public:
    // comm: the communicator, with all its ranks. routes: null if they are one team.
    Memories(const KcclDeviceComm& comm, const KcclRoutes* routes) : comm_(comm), routes_(routes) {}

    // Copies num_bytes from address `from` in the process of `rank`. Returns 0 or errno.
    int read(int rank, void* to, uint64_t from, uint64_t num_bytes) const {
        if (routes_ == nullptr) return kccl_host_read_peer(context(), rank, to, from, num_bytes);
        return kccl_host_read_process(routes_->pid[rank], to, from, num_bytes);
    }

    // Tells whether this process may read the memory of `rank`. If not, notes it in the context, so
    // that the user is warned.
    bool may_read(int rank) const {
        if (routes_ == nullptr) return kccl_host_may_read_peer(context(), rank) != 0;
        uint64_t word;
        const int error = read(rank, &word, routes_->probe[rank], sizeof(word));
        return kccl_host_note_read(context(), rank, routes_->pid[rank], error) != 0;
    }

    // Tells whether other processes can read these bytes of this rank: tries the first and the
    // last one.
    bool is_readable(uint64_t address, uint64_t num_bytes) const {
        uint8_t byte;
        return read(comm_.rank, &byte, address, 1) == 0 &&
               read(comm_.rank, &byte, address + num_bytes - 1, 1) == 0;
    }

    // Returns the length in bytes beyond which a message goes by its address, to the ring of
    // `pair`. Among more ranks than a team has there are often fewer cores. There a sender shall
    // not wait for a receiver that has no core, if the ring has room for its message.
    uint64_t most_by_ring(const KcclDeviceComm& pair) const {
        return routes_ == nullptr ? kMostPieceBytes : pair.layout.message_bytes / 2;
    }

  private:
    uint64_t context() const {
        return reinterpret_cast<const KcclState*>(comm_.state)->idle_context;
    }

    const KcclDeviceComm& comm_;
    const KcclRoutes* const routes_;
};

// The messages that this rank sends to one peer.
class Outbox {
  public:
    // memories: null if the peer's process may not read this process's memory. far: the link by MPI
    // to a peer on another node; null for a peer on this node.
    Outbox(const KcclDeviceComm& comm, int peer, const Memories* memories, FarLink* far)
        : comm_(comm), peer_(peer), memories_(memories), writer_(comm, peer, far) {}

    void add(KcclMessage* message) {
        if (may_go_by_address(*message)) message->state = kReadable;
        sends_.add(message);
    }

    // Sends as much as is possible without waiting. Completes the sends whose bytes the peer has
    // read from this process's memory.
    void move() {
        if (!offered_.is_empty()) hear_tickets();
        if (!sends_.is_empty()) send_some();
    }

  private:
    bool may_go_by_address(const KcclMessage& message) const {
        return memories_ != nullptr && message.num_bytes > memories_->most_by_ring(comm_) &&
               memories_->is_readable(message.address, message.num_bytes);
    }

    // Puts the messages in sends_ into the peer's ring, in order, until the ring is full.
    void send_some() {
        while (KcclMessage* message = sends_.first()) {
            const bool is_first = message->moved == 0;
            const uint32_t index = free_ticket();
            // A long message needs a ticket to go by its address. If no ticket is free, the message
            // goes in pieces, so that the messages behind it do not wait for a ticket.
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

    // Puts the address of a long message into the ring, with a ticket, by which the receiver later
    // says that it has read the bytes. index: that of a free ticket. Returns false if the ring has
    // no room.
    bool offer(KcclMessage* message, uint32_t index) {
        // A ticket is never 0: its word in this rank's scratch holds 0 until the receiver first
        // returns one.
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

    // Reads the words of this rank's scratch in which the peer returns tickets. Completes the sends
    // whose bytes the peer has read. Queues those that it could not read once more, so that their
    // bytes go through the ring.
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
    const Memories* const memories_;
    WayOut writer_;
    Queue sends_;                // messages of which not all is in the ring yet
    Queue offered_;              // messages whose address is in the ring; their tickets are not
                                 // back
    uint32_t busy_tickets_ = 0;  // the tickets in use, a bit for each index
    uint32_t ticket_count_ = 0;  // how many tickets were used so far
};

}  // namespace
}  // namespace kccl::host
