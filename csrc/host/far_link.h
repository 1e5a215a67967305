// Records of messages (include/kccl/messages.cuh) between two ranks of different nodes, by MPI.
//
//     sender:    copies a record into memory that MPI reads, and sends it
//     receiver:  has some receives under way; it takes their records in the order in which they
//                were sent, begins each receive again, and says now and then how much it has taken
//
// What the receiver says bounds what is under way, as the room of a ring does. Nothing here waits
// within MPI. A link that ends may leave requests behind, as a step between nodes may
// (nodes_exchange.h): Python then keeps their memory.
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

    // As those of RecordWriter and RecordReader.
    bool put(RecordHead head, RecordKind kind, const void* piece, uint32_t piece_bytes);
    const RecordHead* next(uint64_t* mark);
    void take(uint64_t mark);

    // Tells the peer that this rank gave up, with its record, or has closed. `record` has the
    // communicator's numbers of ranks.
    void depart(KcclDeparture departure, const KcclRecord& record);

    // What the peer has told: null until it has given up, and whether it has closed.
    const KcclRecord* given_up() const { return has_given_up_ ? &record_ : nullptr; }
    bool has_closed() const { return has_closed_; }
    // MPI cannot reach the peer.
    bool is_broken() const { return is_broken_; }

    // Whether MPI still sends something of this rank's.
    bool is_sending();
    // Ends all receives. Returns whether MPI may still use the memory.
    bool close();

    static uint64_t num_bytes();

  private:
    static constexpr uint32_t kOutUnits = 1024, kMostUntaken = 768, kInSlots = 4, kWords = 8;
    static constexpr uint64_t kWordBytes = 128;

    struct Sent {
        uint64_t request;
        uint32_t end;  // behind its last unit
    };

    // Both begin an operation. False: MPI has refused.
    bool send(const void* from, uint64_t num_bytes, uint64_t* request);
    void receive(uint32_t slot);
    bool is_done(uint64_t* request);
    // Lets go of what MPI has sent.
    void reap();
    // Sends a word beside the records. False: those before it are still under way, which does not
    // happen to a departure.
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
    // Units: written, with what was skipped; of them sent by MPI; given; and taken by the peer.
    uint32_t written_ = 0, reaped_ = 0, given_ = 0, heard_ = 0;
    FarRequest words_[kWords] = {};
    FarRequest slots_[kInSlots] = {};
    uint32_t at_ = 0;        // the slot of the next record
    bool is_there_ = false;  // it has come
    uint32_t taken_ = 0, said_ = 0;
    bool has_given_up_ = false, has_closed_ = false, is_broken_ = false;
    KcclRecord record_ = {};
};

// The way of records to a peer: its ring, or MPI.
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

// The way of a peer's records to this rank.
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
