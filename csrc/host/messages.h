// Messages between two ranks on CPUs: send, recv, and what is under way.
//
// A short message is copied into the receiver's ring (include/kccl/messages.cuh), so its send ends
// before the receiver has asked for it. Of a long message only the address goes into the ring. The
// receiver copies the bytes out of the sender's memory, and then writes the message's ticket, a
// number, into the sender's scratch, which ends the send. Where processes may not read each other's
// memory, a long message goes through the ring in pieces.
//
// A message is received by the first receive that asks for its source and tag. Messages of one
// source and tag are received in the order in which they were sent. If no receive has asked for a
// message when it comes, it leaves the ring and waits in this rank's memory ("early"), because a
// receive may have asked for a message behind it. Of a long message only the address waits.
//
// There is no thread for messages. Those under way move on only within this rank's calls that send,
// receive, wait or test.
#pragma once

#include <stdlib.h>

#include <new>

#include "early.h"
#include "message_waits.h"
#include "outbox.h"
#include "routes.h"

namespace kccl::host {
namespace {

// The messages under way between this rank and one peer.
struct Peer {
    // rank: the peer's number in `comm`. far: the link by MPI to a peer on another node; else null.
    // memories: null if the two ranks may not read each other's memory.
    Peer(const KcclDeviceComm& comm, int rank, const Memories* memories, FarLink* far)
        : comm(comm), rank(rank), outbox(comm, rank, memories, far), reader(comm, rank, far) {}

    // Returns the ticket of a long message to this peer, which has sent it.
    void give_back(uint32_t ticket, uint32_t answer) const {
        mem::store<mem::Order::kRelease, mem::Scope::kSystem>(
            ticket_word(comm, rank, comm.rank, ticket % kKcclMessageTickets), answer);
    }

    const KcclDeviceComm& comm;
    const int rank;

    Outbox outbox;
    WayIn reader;
    EarlyList early;
    Queue resent;  // receives whose bytes this rank could not read, so the peer sends them by ring
    // While a message comes in pieces, one of these two is set. The next piece (RecordKind::kMore)
    // goes to the receive `to`, or to the early message `keeps`.
    KcclMessage* to = nullptr;
    Early* keeps = nullptr;
};

// All messages of one rank. An array with a Peer for each rank follows this object in memory.
class Messages {
  public:
    // routes: how messages reach the ranks of several teams (a team is a group of at most 8 ranks
    // whose scratches are mapped); null if all ranks are one team, whose scratches `comm` has.
    Messages(const KcclDeviceComm& comm, bool may_attach, KcclRoutes* routes)
        : comm_(comm), routes_(routes), memories_(comm, routes), waits_(comm, routes) {
        const Memories* const memories = may_attach ? &memories_ : nullptr;
        for (int rank = 0; rank < comm_.world_size; ++rank) {
            if (routes == nullptr) {
                new (&peer(rank)) Peer(comm_, rank, memories, nullptr);
            } else {
                FarLink* const far = link_of(*routes, rank);
                new (&peer(rank)) Peer(pair_of(*routes, rank), place_in_pair(*routes, rank),
                                       far == nullptr ? memories : nullptr, far);
            }
        }
    }
    ~Messages() {
        for (int rank = 0; rank < comm_.world_size; ++rank) peer(rank).~Peer();
    }
    static uint64_t num_bytes(int world_size) {
        return sizeof(Messages) + static_cast<uint64_t>(world_size) * sizeof(Peer);
    }
    Messages(const Messages&) = delete;
    Messages& operator=(const Messages&) = delete;

    // start() begins a message and then calls move(). move() sends, receives and completes what it
    // can of all messages, without waiting. Both return the communicator's status. After a failure
    // they do nothing, because the memory of messages may be gone.
    Status start(KcclMessage* message) {
        if (status_of(comm_) != kKcclOk) return status_of(comm_);
        message->is_done = 0;
        message->moved = 0;
        message->state = kQueued;
        if (message->receives == 0) {
            peer(message->peer).outbox.add(message);
        } else if (!take_early(message)) {
            receives_.add(message);
        }
        return move();
    }

    Status move() {
        int rank = first_source_;
        for (int i = 0; i < comm_.world_size; ++i, rank = behind(rank)) {
            if (status_of(comm_) != kKcclOk) break;
            peer(rank).outbox.move();
            receive_some(rank);
        }
        return status_of(comm_);
    }

    void make(KcclMessage* message) {
        if (start(message) == kKcclOk) wait(message);
    }

    // Begins all messages, receives first, so that arriving bytes are copied straight to their
    // buffers. Returns when all messages are done, or after a failure.
    void make_all(KcclMessage* messages, uint64_t count) {
        for (const uint32_t receives : {1u, 0u}) {
            for (uint64_t i = 0; i < count; ++i) {
                if (messages[i].receives == receives && start(&messages[i]) != kKcclOk) return;
            }
        }
        for (uint64_t i = 0; i < count && status_of(comm_) == kKcclOk; ++i) wait(&messages[i]);
    }

    // Returns when the message is done, or after a failure.
    void wait(KcclMessage* message) {
        const auto poll = [&] {
            if (message->is_done == 0) move();
            return message->is_done != 0 || status_of(comm_) != kKcclOk;
        };
        waits_.wait(*message, poll, [&](uint64_t ranks) { return num_early(ranks); });
    }

    // Sends, receives and completes what it can of all messages, without waiting. Checks now and
    // then whether `message` can still complete. Returns the communicator's status.
    Status test(const KcclMessage* message) {
        if (move() != kKcclOk || message->is_done != 0) return status_of(comm_);
        waits_.look(*message, [&](uint64_t ranks) { return num_early(ranks); });
        return move();
    }

  private:
    Peer& peer(int rank) { return reinterpret_cast<Peer*>(this + 1)[rank]; }
    int behind(int rank) const { return rank + 1 < comm_.world_size ? rank + 1 : 0; }

    void fail(const Record& record) {
        if (routes_ == nullptr) return give_up(comm_, record);
        fail_all(*reinterpret_cast<const KcclHostTeams*>(routes_->teams), record);
    }

    // ---- Receiving -----------------------------------------------------------------------------

    static bool wants(const KcclMessage* receive, int source, int32_t tag) {
        return (receive->peer < 0 || receive->peer == source) && takes_tag(receive->tag, tag);
    }

    // Removes the first receive in receives_ that asks for this message, and returns it. Returns
    // null if there is none, or if the lengths differ; in the latter case this rank has failed.
    KcclMessage* take_receive(int source, const RecordHead& head) {
        for (KcclMessage* each = receives_.first(); each != nullptr; each = Queue::after(each)) {
            if (!wants(each, source, head.tag)) continue;
            receives_.remove(each);
            return match(each, source, head) ? each : nullptr;
        }
        return nullptr;
    }

    // Gives a receive its message: stores the message's source and tag in it. If the two lengths
    // differ, fails this rank and returns false.
    bool match(KcclMessage* receive, int source, const RecordHead& head) {
        receive->source = source;
        receive->source_tag = head.tag;
        if (receive->peer < 0) first_source_ = behind(source);
        if (receive->num_bytes == head.num_bytes) return true;
        fail(lengths_differ(comm_, *receive, source, head));
        return false;
    }

    // Gives a receive the first early message that it asks for. If some bytes of the message have
    // not come, store() completes the receive later. Returns false if there is no such message.
    bool take_early(KcclMessage* receive) {
        const bool any = receive->peer < 0;
        int source = any ? first_source_ : receive->peer;
        for (int i = 0; i < (any ? comm_.world_size : 1); ++i, source = behind(source)) {
            EarlyList& list = peer(source).early;
            for (Early** link = list.begin(); *link != nullptr; link = &(*link)->next) {
                Early* early = *link;
                if (early->wanted != nullptr || !wants(receive, source, early->head.tag)) continue;
                if (!match(receive, source, early->head)) return true;
                if (kind_of(early->head.mark) == RecordKind::kAddress) {
                    list.remove(link);
                    read(source, receive, early->head);
                    free(early);
                } else if (early->moved < early->head.num_bytes) {
                    early->wanted = receive;
                } else {
                    list.remove(link);
                    hand_over(early, receive);
                }
                return true;
            }
        }
        return false;
    }

    static void hand_over(Early* early, KcclMessage* receive) {
        mem::copy(reinterpret_cast<void*>(receive->address), early->bytes, early->head.num_bytes, 0,
                  1);
        receive->is_done = 1;
        free(early);
    }

    // Copies a long message from the sender's process, and writes its ticket into the sender's
    // scratch. kRefused in the ticket says that the copy failed: the sender then uses the ring.
    void read(int source, KcclMessage* receive, const RecordHead& head) {
        const int error = memories_.read(source, reinterpret_cast<void*>(receive->address),
                                         head.address, head.num_bytes);
        uint64_t left = 0;
        // A sender that gave up, or has closed, may have freed the bytes before they were read.
        if (has_given_up(&left)) return;
        if ((left >> source & 1u) != 0) {
            fail(Record{kKcclPeerLeft, comm_.rank, source, kKcclRecv, head.tag,
                        num_early(uint64_t{1} << source), 1, 0, 0});
            return;
        }
        uint32_t answer = head.ticket;
        if (error != 0) {
            // If the sender's probe (a word for such tries) can be read, the address of these bytes
            // is wrong: an error. If the sender has ended, the wait for its bytes will find that.
            if (memories_.may_read(source)) {
                fail(Record{kKcclUnreadable, comm_.rank, source, kKcclRecv, head.tag,
                            static_cast<uint32_t>(error), 0, 0, 0});
                return;
            }
            answer |= kRefused;
            receive->ticket = head.ticket;
            receive->state = kOffered;
            peer(source).resent.add(receive);
        } else {
            receive->is_done = 1;
        }
        peer(source).give_back(head.ticket, answer);
    }

    // Tells whether a rank has given up; then this rank has failed, too. Sets in *left a bit for
    // each rank that has closed the communicator.
    bool has_given_up(uint64_t* left) {
        if (routes_ != nullptr) {
            const bool has = hear_routes(*routes_);
            *left = routes_->closed;
            return has;
        }
        uint32_t closed = 0;
        const bool has = !nobody_gave_up(comm_, &closed);
        *left = closed;
        return has;
    }

    KcclMessage* take_resent(Peer& from, uint32_t ticket) {
        KcclMessage* each = from.resent.first();
        while (each != nullptr && each->ticket != ticket) each = Queue::after(each);
        if (each != nullptr) from.resent.remove(each);
        return each;
    }

    void receive_some(int source) {
        Peer& from = peer(source);
        uint64_t mark;
        while (const RecordHead* at = from.reader.next(&mark)) {
            const RecordHead head = {mark, at->num_bytes, at->address, at->tag, at->ticket};
            const RecordKind kind = kind_of(mark);
            if (kind == RecordKind::kResent) {
                from.to = take_resent(from, head.ticket);
            } else if (kind != RecordKind::kMore) {
                from.to = take_receive(source, head);
                if (status_of(comm_) != kKcclOk) return;
                if (from.to == nullptr) {
                    from.keeps = from.early.keep(head, mark);
                    if (from.keeps == nullptr) {
                        fail(Record{kKcclUnreadable, comm_.rank, source, kKcclRecv, head.tag,
                                    kNoMemory, 0, 0, 0});
                        return;
                    }
                }
            }
            if (kind == RecordKind::kAddress) {
                if (from.to != nullptr) read(source, from.to, head);
                from.to = nullptr;
                from.keeps = nullptr;
                if (status_of(comm_) != kKcclOk) return;
            } else {
                store(from, at + 1, piece_bytes_of(mark));
            }
            from.reader.take(mark);
        }
    }

    // Copies a record's bytes to the buffer of the receive `from.to`, or to the early message
    // `from.keeps`, whichever is set. After the last byte, completes the receive. An early message
    // that no receive has asked for yet stays in the list.
    void store(Peer& from, const void* piece, uint32_t num_bytes) {
        if (KcclMessage* to = from.to) {
            mem::copy(reinterpret_cast<uint8_t*>(to->address) + to->moved, piece, num_bytes, 0, 1);
            to->moved += num_bytes;
            if (to->moved < to->num_bytes) return;
            to->is_done = 1;
            from.to = nullptr;
        } else if (Early* early = from.keeps) {
            mem::copy(early->bytes + early->moved, piece, num_bytes, 0, 1);
            early->moved += num_bytes;
            if (early->moved < early->head.num_bytes) return;
            from.keeps = nullptr;
            if (early->wanted == nullptr) return;
            Early** link = from.early.begin();
            while (*link != early) link = &(*link)->next;
            from.early.remove(link);
            hand_over(early, early->wanted);
        }
    }

    // Returns the number of early messages from these ranks. ranks: a bit each.
    uint32_t num_early(uint64_t ranks) {
        uint32_t num = 0;
        for (int rank = 0; rank < comm_.world_size; ++rank) {
            if ((ranks >> rank & 1u) == 0) continue;
            const Early* each = peer(rank).early.first();
            for (; each != nullptr; each = each->next) ++num;
        }
        return num;
    }

    static constexpr uint32_t kNoMemory = 12;  // the value of ENOMEM

    const KcclDeviceComm& comm_;
    KcclRoutes* const routes_;
    const Memories memories_;
    Queue receives_;  // receives of which no message has come yet
    // The rank whose messages are taken first: the rank after the source of the last message that a
    // receive from any rank got. So a rank that sends much does not starve the others.
    int first_source_ = 0;
    MessageWaits waits_;
};
static_assert(alignof(Peer) <= alignof(Messages), "Peers lie behind Messages");

}  // namespace
}  // namespace kccl::host
