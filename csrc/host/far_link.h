// Records of messages (include/kccl/messages.cuh) between two ranks of different nodes, by MPI.
//
//     sender:    copies a record into memory that MPI reads, and sends it
//     receiver:  keeps kInSlots receives under way, takes the records in the order in which they
//                were sent, begins each receive again, and says now and then how much it has taken
//
// The sender stops when too much is not taken, as at a full ring. No call of MPI here blocks. A
// link that closes may leave requests behind, as a step between nodes may (nodes_exchange.h).
// Python then keeps their memory.
#pragma once

#include "../include/kccl/messages.cuh"
#include "nodes.h"

extern "C" {
#include "routes.inc"
}

namespace kccl::host {

// A request of MPI, at most 8 bytes.
struct FarRequest {
    uint64_t request;
    bool is_pending;
};

class FarLink {
  public:
    // Begins to receive.
    FarLink(const KcclRoutes& routes, int peer);
    FarLink(const FarLink&) = delete;
    FarLink& operator=(const FarLink&) = delete;

    // As in RecordWriter (put) and RecordReader (next, take).
    bool put(RecordHead head, RecordKind kind, const void* piece, uint32_t piece_bytes);
    const RecordHead* next(uint64_t* mark);
    void take(uint64_t mark);

    // Tells the peer that this rank has closed, or that it gave up, with its record, in which ranks
    // have their numbers in the communicator.
    void depart(KcclDeparture departure, const KcclRecord& record);

    // given_up() returns the record of the peer that gave up; null: the peer has not said so.
    // has_closed() tells whether the peer has said that it closed.
    const KcclRecord* given_up() const { return has_given_up_ ? &record_ : nullptr; }
    bool has_closed() const { return has_closed_; }
    // Tells whether MPI has reported an error, so that the link is not used any more.
    bool is_broken() const { return is_broken_; }

    // Tells whether MPI has not yet sent all that this rank has given it.
    bool is_sending();
    // Cancels all receives. Returns true if MPI may still use the link's memory.
    bool close();

    static uint64_t num_bytes();

  private:
    static constexpr uint32_t kOutUnits = 1024, kMostUntaken = 768, kInSlots = 4, kWords = 8;
    static constexpr uint64_t kWordBytes = 128;

    struct Sent {
        uint64_t request;
        uint32_t end;  // the count of written_ behind it
    };

    // Both begin an operation of MPI. If MPI refuses, the link is broken, and send() returns false.
    bool send(const void* from, uint64_t num_bytes, uint64_t* request);
    void receive(uint32_t slot);
    bool is_done(uint64_t* request);
    // Frees the memory of records that MPI has sent.
    void reap();
    // Sends a word to the peer, which is no record of a message. Returns false if all words are
    // under way; a departure has a word of its own.
    bool say(uint32_t kind, uint64_t number, const void* piece, uint32_t piece_bytes);
    void say_taken();
    void hear(const RecordHead* head);
    uint8_t* in_slot(uint32_t slot) const {
        return memory_ + (kOutUnits + slot * kSlotUnits) * kUnit;
    }

    static constexpr uint64_t kUnit = kKcclMessageUnit;
    static constexpr uint64_t kSlotUnits = kMostRecordBytes / kUnit;

    const KcclRoutes& routes_;
    const KcclNodes& nodes_;
    const int peer_;
    uint8_t* const memory_;
    Sent sent_[kOutUnits];
    uint32_t first_sent_ = 0, end_sent_ = 0;  // in sent_, modulo its length
    // Counts of units. written_: of sent records and of the skipped ends of the memory. reaped_:
    // how many of these MPI has sent. given_: of sent records. heard_: what the peer has taken of
    // these.
    uint32_t written_ = 0, reaped_ = 0, given_ = 0, heard_ = 0;
    FarRequest words_[kWords] = {};
    FarRequest slots_[kInSlots] = {};
    uint32_t at_ = 0;        // the slot of the next record
    bool is_there_ = false;  // the next record has come
    uint32_t taken_ = 0, said_ = 0;
    bool has_given_up_ = false, has_closed_ = false, is_broken_ = false;
    KcclRecord record_ = {};
};

// Sends records to a peer: by MPI if it is on another node (`far` is not null), otherwise by its
// ring.
class WayOut {
  public:
    WayOut(const KcclDeviceComm& comm, int peer, FarLink* far) : ring_(comm, peer), far_(far) {}

    bool put(const RecordHead& head, RecordKind kind, const void* piece, uint32_t piece_bytes) {
        return far_ == nullptr ? ring_.put(head, kind, piece, piece_bytes)
                               : far_->put(head, kind, piece, piece_bytes);
    }

  private:
    RecordWriter ring_;
    FarLink* far_;
};

// Receives a peer's records: by MPI if it is on another node (`far` is not null), otherwise by a
// ring.
class WayIn {
  public:
    WayIn(const KcclDeviceComm& comm, int source, FarLink* far) : ring_(comm, source), far_(far) {}

    const RecordHead* next(uint64_t* mark) {
        return far_ == nullptr ? ring_.next(mark) : far_->next(mark);
    }
    void take(uint64_t mark) { far_ == nullptr ? ring_.take(mark) : far_->take(mark); }

  private:
    RecordReader ring_;
    FarLink* far_;
};

}  // namespace kccl::host
