// Rings of messages between two ranks: how send and recv move their bytes on CPUs.
//
// Each rank's scratch has one ring for each source, in which that rank leaves records. A record
// begins at a unit of kKcclMessageUnit bytes, with a head, and its bytes follow. No record wraps
// around the ring's end: if one does not fit there, a record to be skipped fills the rest.
//
//     sender:    waits until the ring has room, writes the bytes, then releases the head's mark
//     receiver:  acquires the mark, takes the bytes, clears the mark of each unit it has passed,
//                and releases `taken`, the number of units it has passed
//
// Why the receiver clears: a mark is valid when it is not zero. Bytes of an earlier, longer record
// may lie where the next mark will be. So the first word of each unit is zero before the sender may
// write there, and the mark alone says that a record has come. A short message is one cache line.
#pragma once

#include "device_comm.h"
#include "window.cuh"

namespace kccl {

enum class RecordKind : uint32_t {
    kSkip = 1,     // no data: the next record lies at the ring's beginning
    kBytes = 2,    // a message, or its first bytes
    kMore = 3,     // the next bytes of the message whose first bytes came last
    kAddress = 4,  // a long message: where its bytes lie in the sender's process
    kResent = 5    // as kBytes, of a long message that the receiver could not read
};

struct RecordHead {
    uint64_t mark;       // low half: RecordKind; high half: the record's bytes behind the head
    uint64_t num_bytes;  // length of the whole message
    uint64_t address;    // kAddress: where the bytes lie in the sender's process
    int32_t tag;
    uint32_t ticket;  // kAddress, kResent: the sender's number of a long message, which the
                      // receiver writes to ticket_word() when it has read the message
};
static_assert(sizeof(RecordHead) == 32, "RecordHead: no padding");

// The most bytes of a message in one record.
constexpr uint64_t kMostPieceBytes = kMostRecordBytes - sizeof(RecordHead);

KCCL_DEVICE RecordKind kind_of(uint64_t mark) {
    return static_cast<RecordKind>(static_cast<uint32_t>(mark));
}
KCCL_DEVICE uint32_t piece_bytes_of(uint64_t mark) { return static_cast<uint32_t>(mark >> 32); }
KCCL_DEVICE uint64_t mark_of(RecordKind kind, uint32_t piece_bytes) {
    return uint64_t{piece_bytes} << 32 | static_cast<uint32_t>(kind);
}
KCCL_DEVICE uint32_t units_of(uint32_t piece_bytes) {
    return (static_cast<uint32_t>(sizeof(RecordHead)) + piece_bytes + kKcclMessageUnit - 1) /
           kKcclMessageUnit;
}

// Returns the address in `rank`'s scratch of the control lines and the ring for `source`. In the
// ring `source` leaves records for `rank`. The control lines are about the opposite direction: in
// them `source` says how much it has taken of the records that `rank` left for it.
KCCL_DEVICE uint8_t* messages_at(const DeviceComm& comm, int rank, int source) {
    const uint64_t bytes = kMessageLines * kKcclLineBytes + comm.layout.message_bytes;
    return scratch_at<uint8_t>(comm, rank, comm.layout.messages + source * bytes);
}
KCCL_DEVICE uint32_t* taken_word(const DeviceComm& comm, int rank, int source) {
    return reinterpret_cast<uint32_t*>(messages_at(comm, rank, source));
}
KCCL_DEVICE uint32_t* ticket_word(const DeviceComm& comm, int rank, int source, uint32_t index) {
    return reinterpret_cast<uint32_t*>(messages_at(comm, rank, source) + kKcclLineBytes) + index;
}
KCCL_DEVICE uint8_t* message_ring(const DeviceComm& comm, int rank, int source) {
    return messages_at(comm, rank, source) + kMessageLines * kKcclLineBytes;
}

// The sender's end of a ring. One thread uses it.
class RecordWriter {
  public:
    KCCL_DEVICE RecordWriter(const DeviceComm& comm, int peer)
        : ring_(message_ring(comm, peer, comm.rank)),
          taken_word_(taken_word(comm, comm.rank, peer)),
          num_units_(static_cast<uint32_t>(comm.layout.message_bytes / kKcclMessageUnit)) {}

    // Writes a record with the `piece_bytes` bytes at `piece`, at most kMostPieceBytes, which may
    // be reused on return. head.mark need not be set. Returns false if the ring has no room now.
    KCCL_DEVICE bool put(RecordHead head, RecordKind kind, const void* piece,
                         uint32_t piece_bytes) {
        const uint32_t units = units_of(piece_bytes);
        const uint32_t to_end = num_units_ - written_ % num_units_;
        const uint32_t skipped = units > to_end ? to_end : 0;
        const auto has_room = [&] { return written_ + skipped + units - taken_ <= num_units_; };
        if (!has_room()) {
            taken_ = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(taken_word_);
            if (!has_room()) return false;
        }
        if (skipped != 0) {
            release(head_at(written_), mark_of(RecordKind::kSkip, 0));
            written_ += skipped;
        }
        RecordHead* to = head_at(written_);
        mem::copy(to + 1, piece, piece_bytes, 0, 1);
        mem::store_plain(&to->num_bytes, head.num_bytes);
        mem::store_plain(&to->address, head.address);
        mem::store_plain(&to->tag, head.tag);
        mem::store_plain(&to->ticket, head.ticket);
        release(to, mark_of(kind, piece_bytes));
        written_ += units;
        return true;
    }

  private:
    KCCL_DEVICE RecordHead* head_at(uint32_t unit) const {
        return reinterpret_cast<RecordHead*>(ring_ + unit % num_units_ * kKcclMessageUnit);
    }
    KCCL_DEVICE static void release(RecordHead* head, uint64_t mark) {
        mem::store<mem::Order::kRelease, mem::Scope::kSystem>(&head->mark, mark);
    }

    uint8_t* ring_;
    const uint32_t* taken_word_;
    uint32_t num_units_;
    uint32_t written_ = 0;  // units that this rank has written, modulo 2^32
    uint32_t taken_ = 0;    // units that the receiver has taken, as far as this rank knows
};

// The receiver's end of a ring. One thread uses it.
class RecordReader {
  public:
    KCCL_DEVICE RecordReader(const DeviceComm& comm, int source)
        : ring_(message_ring(comm, comm.rank, source)),
          taken_word_(taken_word(comm, source, comm.rank)),
          num_units_(static_cast<uint32_t>(comm.layout.message_bytes / kKcclMessageUnit)) {}

    // Returns the head of the next record, or null if none has come. *mark gets its mark. The
    // record's bytes follow its head, and stay there until take().
    KCCL_DEVICE const RecordHead* next(uint64_t* mark) {
        for (;;) {
            RecordHead* head = head_at(taken_);
            *mark = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(&head->mark);
            if (*mark == 0) return nullptr;
            if (kind_of(*mark) != RecordKind::kSkip) return head;
            pass(num_units_ - taken_ % num_units_);
        }
    }

    // Frees the record that next() returned, so that the sender may write to its part of the ring
    // again. `mark`: the record's mark.
    KCCL_DEVICE void take(uint64_t mark) { pass(units_of(piece_bytes_of(mark))); }

  private:
    KCCL_DEVICE RecordHead* head_at(uint32_t unit) const {
        return reinterpret_cast<RecordHead*>(ring_ + unit % num_units_ * kKcclMessageUnit);
    }

    // Clears the marks of `units` units and counts them as taken. Tells the sender only when it has
    // taken another quarter of the ring, because each time a cache line moves between the ranks.
    KCCL_DEVICE void pass(uint32_t units) {
        for (uint32_t i = 0; i < units; ++i) {
            mem::store_plain(&head_at(taken_ + i)->mark, uint64_t{0});
        }
        taken_ += units;
        if (taken_ - said_ < num_units_ / 4) return;
        said_ = taken_;
        mem::store<mem::Order::kRelease, mem::Scope::kSystem>(taken_word_, taken_);
    }

    uint8_t* ring_;
    uint32_t* taken_word_;
    uint32_t num_units_;
    uint32_t taken_ = 0;  // units that this rank has taken, modulo 2^32
    uint32_t said_ = 0;   // the value of taken_ that the sender was told last
};

}  // namespace kccl
