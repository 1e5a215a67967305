// Exchange, with which nodes.cpp makes every step between nodes: each rank of a team (here one rank
// of each node, at most 8) sends each other rank a message by MPI.
//
// Messages go in pieces, of which two are under way in each direction. MPI reads and writes the
// pieces in memory of the team, never in the caller's arrays. So a step that fails may leave
// requests of MPI under way, which MPI has no way to end in time. Before the next call, Python
// gives the team other memory and other tags (kccl/backends/nodes.py). No call of MPI here blocks.
//
// MPI does not report that a process has ended. So each two ranks also have a socket
// (KcclNodes.socket), which the operating system closes when the peer's process ends. A rank that
// fails or closes says so by a control record on its sockets. When a socket has ended, a message of
// that peer may still be on its way, so the rank waits kLastWordsNs longer for it.
//
// MPI makes progress only while the process is in one of its calls, so a message may still be in
// its sender's process after MPI_Isend() has returned. A rank that closes therefore goes on calling
// MPI for kFlushNs, or until its peers close too. MPI sends the rest when the process ends. So a
// rank waits kClosedNs for a message of a peer that has closed.
#pragma once

#include <string.h>

#include "../include/kccl/wait.cuh"
#include "mpi.h"
#include "nodes.h"

namespace kccl::host {
namespace {

// A slot holds a header and one piece of a message. For each peer there are kSlots slots to send
// from and kSlots to receive into; piece i uses slot i % kSlots.
constexpr uint64_t kPieceBytes = 256 * 1024, kHeaderBytes = 64, kSlots = 2;
constexpr uint64_t kSlotBytes = kHeaderBytes + kPieceBytes;
constexpr uint64_t kClosedNs = 2'000'000'000;  // how long to wait for a message of a peer that has
                                               // closed
constexpr int kMost = kKcclMaxWorldSize;

// The first bytes of a slot, which say to which call the piece belongs.
struct Header {
    uint64_t num_bytes;  // of the call
    uint32_t sequence;   // the number of the call on its channel
    uint32_t call;       // as KcclRecord.call
};
static_assert(sizeof(Header) <= kHeaderBytes);

// The MPI_Request for the piece in a slot, and whether its operation is under way.
struct Slot {
    uint64_t request = 0;
    bool is_pending = false;
};

// One peer's share of an exchange: the bytes that this rank sends to it, and those that come from
// it.
struct Transfer {
    const uint8_t* from = nullptr;
    uint64_t send_bytes = 0;
    uint8_t* to = nullptr;  // null if take(), an argument of run(), reduces the pieces
    uint64_t receive_bytes = 0;
};

uint64_t pieces_of(uint64_t bytes) {
    return bytes == 0 ? 1 : (bytes + kPieceBytes - 1) / kPieceBytes;
}

uint64_t piece_bytes(uint64_t bytes, uint64_t piece) {
    const uint64_t begin = piece * kPieceBytes;
    if (begin >= bytes) return 0;
    return bytes - begin < kPieceBytes ? bytes - begin : kPieceBytes;
}

// The exchange of one step.
class Exchange {
  public:
    Exchange(KcclNodes& nodes, const KcclHostStep& step)
        : nodes_(nodes),
          step_(step),
          state_(*reinterpret_cast<KcclState*>(step.op.call.comm.state)) {
        const Call& call = step.op.call;
        mine_ = {
            call.count * step.op.bytes_per_count, ++nodes.sequence[call.channel],
            call.kernel << 24 | call.dtype << 16 | call.op << 8 | static_cast<uint32_t>(call.peer)};
    }

    Transfer transfer[kMost];

    // Sends and receives all messages, as transfer[] lists them. Calls take(i) when piece i has
    // come from every peer; in a step that reduces, take() adds the pieces up. Returns false if the
    // step has failed.
    template <class Take>
    bool run(Take take) {
        uint64_t rounds = 1;
        for_peers([&](int peer) {
            const Transfer& each = transfer[peer];
            const uint64_t out = pieces_of(each.send_bytes), in = pieces_of(each.receive_bytes);
            rounds = out > rounds ? out : rounds;
            rounds = in > rounds ? in : rounds;
        });
        for (uint64_t piece = 0; piece < kSlots; ++piece) receive(piece);
        for (uint64_t piece = 0; piece < rounds; ++piece) {
            // The slot still has the piece that is kSlots before this one. MPI must have sent that
            // piece before the slot is overwritten.
            if (piece >= kSlots && !wait(sends_, piece)) return false;
            send(piece);
            if (!wait(receives_, piece)) return false;
            if (!are_of_this_call(piece)) return false;
            for_peers([&](int peer) { store(peer, piece); });
            take(piece);
            receive(piece + kSlots);
        }
        for (uint64_t slot = 0; slot < kSlots; ++slot) {
            if (!wait(sends_, slot)) return false;
        }
        return status_of(step_.op.call.comm) == kKcclOk;
    }

    bool run() {
        return run([](uint64_t) {});
    }

    const uint8_t* received(int peer, uint64_t piece) const {
        return slot_memory(1, peer, piece) + kHeaderBytes;
    }

    // Ends a failed exchange: cancels its receives, and sets nodes.is_pending if requests are still
    // under way, because MPI cannot end them now and may still use their slots.
    void abandon() {
        const auto cancel = reinterpret_cast<int (*)(void*)>(nodes_.cancel);
        for (int peer = 0; peer < nodes_.world_size; ++peer) {
            for (uint64_t slot = 0; slot < kSlots; ++slot) {
                nodes_.is_pending |= sends_[peer][slot].is_pending;
                if (!receives_[peer][slot].is_pending) continue;
                nodes_.is_pending = 1;
                cancel(&receives_[peer][slot].request);
            }
        }
    }

  private:
    using Slots = Slot[kMost][kSlots];

    template <class Do>
    void for_peers(Do act) {
        for (int i = 1; i < nodes_.world_size; ++i) act((nodes_.rank + i) % nodes_.world_size);
    }

    uint8_t* slot_memory(int direction, int peer, uint64_t piece) const {
        const auto number = static_cast<uint64_t>(direction * nodes_.world_size + peer);
        return reinterpret_cast<uint8_t*>(nodes_.memory) +
               (number * kSlots + piece % kSlots) * kSlotBytes;
    }

    void receive(uint64_t piece) {
        for_peers([&](int peer) {
            if (piece >= pieces_of(transfer[peer].receive_bytes)) return;
            Slot& slot = receives_[peer][piece % kSlots];
            void* const to = slot_memory(1, peer, piece);
            const int bytes = static_cast<int>(kSlotBytes), from = nodes_.mpi_rank[peer];
            const int tag = nodes_.tag + step_.op.call.channel;
            const int error = nodes_.handle_bytes == 4
                                  ? Mpi<int>::irecv(nodes_, to, bytes, from, tag, &slot.request)
                                  : Mpi<void*>::irecv(nodes_, to, bytes, from, tag, &slot.request);
            slot.is_pending = error == 0;
            if (error != 0) failed_ |= 1u << peer;
        });
    }

    void send(uint64_t piece) {
        for_peers([&](int peer) {
            const Transfer& each = transfer[peer];
            if (piece >= pieces_of(each.send_bytes)) return;
            Slot& slot = sends_[peer][piece % kSlots];
            uint8_t* const from = slot_memory(0, peer, piece);
            const uint64_t payload = piece_bytes(each.send_bytes, piece);
            memcpy(from, &mine_, sizeof(mine_));
            if (payload > 0) {
                memcpy(from + kHeaderBytes, each.from + piece * kPieceBytes, payload);
            }
            const int bytes = static_cast<int>(kHeaderBytes + payload), to = nodes_.mpi_rank[peer];
            const int tag = nodes_.peer_tag[peer] + step_.op.call.channel;
            const int error = nodes_.handle_bytes == 4
                                  ? Mpi<int>::isend(nodes_, from, bytes, to, tag, &slot.request)
                                  : Mpi<void*>::isend(nodes_, from, bytes, to, tag, &slot.request);
            slot.is_pending = error == 0;
            if (error != 0) failed_ |= 1u << peer;
        });
    }

    void store(int peer, uint64_t piece) {
        const Transfer& each = transfer[peer];
        const uint64_t payload = piece_bytes(each.receive_bytes, piece);
        if (each.to == nullptr || payload == 0) return;
        memcpy(each.to + piece * kPieceBytes, received(peer, piece), payload);
    }

    // Compares this call with the peers' calls, by the headers of their first pieces. If one
    // differs, fails the step and returns false.
    bool are_of_this_call(uint64_t piece) {
        if (piece > 0) return true;
        bool are_same = true;
        for_peers([&](int peer) {
            Header theirs;
            memcpy(&theirs, slot_memory(1, peer, piece), sizeof(theirs));
            if (memcmp(&theirs, &mine_, sizeof(theirs)) == 0 || !are_same) return;
            are_same = false;
            const Awaited awaited = {mine_.call >> 24, step_.op.call.channel, mine_.sequence};
            refuse_call(step_.op.call.comm, awaited, peer, {mine_.num_bytes, 0, mine_.call},
                        {theirs.num_bytes, 0, theirs.call});
        });
        return are_same;
    }

    // Waits until the requests for this piece, of all peers, are done. Returns false if the wait
    // has failed.
    bool wait(Slots& slots, uint64_t piece) {
        const auto test = reinterpret_cast<int (*)(void*, int*, void*)>(nodes_.test);
        uint64_t began_ns = 0, looked_ns = 0, gone_since_ns = 0;
        for (;;) {
            uint32_t missing = 0;
            for (int peer = 0; peer < nodes_.world_size; ++peer) {
                Slot& slot = slots[peer][piece % kSlots];
                if (!slot.is_pending) continue;
                int is_done = 0;
                alignas(8) uint8_t mpi_status[kStatusBytes];
                if (test(&slot.request, &is_done, mpi_status) != 0) {
                    failed_ |= 1u << peer;
                    slot.is_pending = false;
                } else if (is_done != 0) {
                    slot.is_pending = false;
                }
                if (slot.is_pending) missing |= 1u << peer;
            }
            if ((missing | failed_) == 0) return true;
            const uint64_t now = kccl_host_clock_ns();
            const uint64_t waited_ns = waited_until(now, began_ns, looked_ns);
            if (!may_go_on(missing, waited_ns, now, gone_since_ns)) return false;
        }
    }

    // Decides whether a wait for MPI may go on, as may_go_on() of wait.cuh decides for waits in
    // shared memory. If the wait has failed, fails this rank and returns false. missing: the peers
    // that are waited for, a bit each. gone_since_ns: when this wait first saw that one of them has
    // ended.
    bool may_go_on(uint32_t missing, uint64_t waited_ns, uint64_t now, uint64_t& gone_since_ns) {
        if (status_of(step_.op.call.comm) != kKcclOk) return false;
        uint32_t gone = 0;
        // kccl_host_idle() also checks, every 2 ms, whether the peers' sockets have ended. Its
        // team_hook (chain.h) reads the control records that came by them.
        uint32_t status = kccl_host_idle(state_.idle_context, waited_ns, missing | failed_, &gone);
        if (status_of(step_.op.call.comm) != kKcclOk) return false;
        gone_ |= gone;
        const uint32_t lost = ((gone_ | nodes_.closed) & missing) | failed_;
        uint32_t culprit = missing | failed_;
        if (status == kKcclInterrupted) {
            culprit = 1u << nodes_.rank;
        } else if (lost != 0) {
            if (gone_since_ns == 0) gone_since_ns = now;
            const bool has_closed = (nodes_.closed & lost) != 0;
            if (now - gone_since_ns < (has_closed ? kClosedNs : kLastWordsNs)) return true;
            culprit = lost;
            status = has_closed ? kKcclPeerLeft : kKcclPeerLost;
        } else {
            const uint64_t limit_ns = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(
                state_.contacted != 0 ? &state_.limit_ns : &state_.first_limit_ns);
            if (waited_ns <= limit_ns) return true;
            status = kKcclTimeout;
        }
        give_up(step_.op.call.comm,
                Record{status, nodes_.rank, first_of(culprit), kKcclNodesKernel + step_.nodes_call,
                       step_.op.call.channel, mine_.sequence - 1, mine_.sequence, 0, waited_ns});
        return false;
    }

    KcclNodes& nodes_;
    const KcclHostStep& step_;
    KcclState& state_;
    Header mine_;
    Slots sends_, receives_;
    uint32_t failed_ = 0;  // the peers for which a call of MPI returned an error, a bit each
    uint32_t gone_ = 0;    // the peers whose sockets have ended, a bit each
};

}  // namespace
}  // namespace kccl::host
