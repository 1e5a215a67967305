// A link by MPI between two ranks on different nodes, for the records that messages are made of
// (include/kccl/messages.cuh).
//
//     sender:    copies a record into memory that MPI reads, and sends it
//     receiver:  keeps kInSlots receives under way, takes the records in the order in which they
//                were sent, and begins a receive again when its record is taken. Now and then it
//                sends back how much it has taken
//
// The sender puts no more records while the receiver has not taken kMostUntaken units, just as it
// would stop at a full ring in shared memory. No call of MPI here blocks. A link that closes may
// leave requests of MPI under way, as a step between nodes may (nodes_exchange.h). Python then
// never frees the memory that these requests use.
#pragma once

#include "../include/kccl/messages.cuh"
#include "nodes.h"

extern "C" {
#include "routes.inc"
}

namespace kccl::host {

// An MPI_Request (at most 8 bytes in MPICH and Open MPI), and whether its operation is under way.
struct FarRequest {
    uint64_t request;
    bool is_pending;
};

class FarLink {
  public:
    // Begins to receive records from `peer`, a rank on another node.
    FarLink(const KcclRoutes& routes, int peer);
    FarLink(const FarLink&) = delete;
    FarLink& operator=(const FarLink&) = delete;

    // put() does what RecordWriter::put() does, next() and take() what they do in RecordReader: see
    // include/kccl/messages.cuh.
    bool put(RecordHead head, RecordKind kind, const void* piece, uint32_t piece_bytes);
    const RecordHead* next(uint64_t* mark);
    void take(uint64_t mark);

    // Tells the peer that this rank has closed (kKcclLeft), or that it gave up, and why (`record`).
    // The ranks in `record` have their numbers in the communicator.
    void depart(KcclDeparture departure, const KcclRecord& record);

    // given_up() returns the failure record that the peer sent when it gave up, or null if it has
    // sent none. has_closed() tells whether the peer has sent that it closed.
    const KcclRecord* given_up() const { return has_given_up_ ? &record_ : nullptr; }
    bool has_closed() const { return has_closed_; }
    // Tells whether MPI has reported an error, so that the link is not used any more.
    bool is_broken() const { return is_broken_; }

    // Tells whether sends of this rank are still under way in MPI. False if the link is broken.
    bool is_sending();
    // Cancels all receives, at the end of the link. Returns true if MPI may still use the link's
    // memory: the caller must then never free it.
    bool close();

    // Returns how many bytes of memory a link needs for message records and control records.
    static uint64_t num_bytes();

  private:
    // The link's memory: kOutUnits units (of kUnit bytes) for records under way to the peer, then
    // kInSlots slots for records from it, then room for kControlRecords control records to it. A
    // control record is a short message about the link itself: how much this rank has taken, that
    // it gave up, or that it has closed. kMostUntaken: the most units that the peer may not have
    // taken yet when this rank sends a record.
    static constexpr uint32_t kOutUnits = 1024, kMostUntaken = 768, kInSlots = 4,
                              kControlRecords = 8;
    static constexpr uint64_t kControlRecordBytes = 128;

    // A record that MPI is sending.
    struct Sent {
        uint64_t request;
        uint32_t end;  // the value of written_ when the record was added
    };

    // send() and receive() begin an operation of MPI. If MPI refuses, the link is broken, and
    // send() returns false.
    bool send(const void* from, uint64_t num_bytes, uint64_t* request);
    void receive(uint32_t slot);
    // Tests a request of MPI. Returns true if its operation is complete; false if that is still
    // under way or the link is broken.
    bool is_done(uint64_t* request);
    // Frees the units of records that MPI has sent.
    void reap();
    // Sends a control record to the peer. Returns false if room for none is free now. The room for
    // one is kept for the news that this rank gave up or has closed.
    bool say(uint32_t kind, uint64_t number, const void* piece, uint32_t piece_bytes);
    // Tells the peer how much this rank has taken, if it has taken enough since it last did.
    void say_taken();
    // Stores what a control record of the peer says in this object's members.
    void hear(const RecordHead* head);
    // Returns the address of a slot for a record from the peer.
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
    // The records that MPI is sending are sent_[i % kOutUnits] for first_sent_ <= i < end_sent_.
    uint32_t first_sent_ = 0, end_sent_ = 0;
    // Counts of units. given_: units of all records that this rank has sent. heard_: how many of
    // these the peer has taken, as far as it has said. written_: given_, plus the units that were
    // skipped at the end of the memory because a record did not fit. reaped_: how many of the
    // written_ units are free again.
    uint32_t written_ = 0, reaped_ = 0, given_ = 0, heard_ = 0;
    FarRequest control_records_[kControlRecords] = {};
    FarRequest slots_[kInSlots] = {};
    uint32_t at_ = 0;        // the slot of the next record
    bool is_there_ = false;  // the next record has come
    // Counts of units that this rank has taken: all of them, and as it last told the peer.
    uint32_t taken_ = 0, said_ = 0;
    bool has_given_up_ = false, has_closed_ = false, is_broken_ = false;
    KcclRecord record_ = {};
};

// Sends records to a peer: by MPI if the peer is on another node (`far` is not null), otherwise by
// this rank's ring in the peer's scratch.
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

// Receives a peer's records: by MPI if the peer is on another node (`far` is not null), otherwise
// by the peer's ring in this rank's scratch.
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
