// A link by MPI between two ranks on different nodes: see far_link.h.
#include "far_link.h"

#include "mpi.h"

namespace kccl::host {
namespace {

// Kinds of control records (far_link.h), numbered behind the kinds in RecordKind. They say how many
// units their sender has taken; that it gave up, with its KcclRecord; that it has closed.
constexpr uint32_t kTaken = 16, kGaveUpRecord = 17, kLeftRecord = 18;
// How often close() tests a receive that it has cancelled. MPI may end such a receive at once, so a
// few tests see it. It may also end much later, and close() does not wait for that.
constexpr int kLooks = 100;

}  // namespace

FarLink::FarLink(const KcclRoutes& routes, int peer)
    : routes_(routes),
      nodes_(*reinterpret_cast<const KcclNodes*>(routes.nodes)),
      peer_(peer),
      memory_(reinterpret_cast<uint8_t*>(routes.memory) +
              static_cast<uint64_t>(peer) * num_bytes()) {
    for (uint32_t slot = 0; slot < kInSlots; ++slot) receive(slot);
}

uint64_t FarLink::num_bytes() {
    return (kOutUnits + kInSlots * kSlotUnits) * kUnit + kControlRecords * kControlRecordBytes;
}

bool FarLink::send(const void* from, uint64_t num_bytes, uint64_t* request) {
    const int bytes = static_cast<int>(num_bytes);
    const int to = routes_.mpi_rank[peer_], tag = routes_.peer_tag[peer_];
    const int error = nodes_.handle_bytes == 4
                          ? Mpi<int>::isend(nodes_, from, bytes, to, tag, request)
                          : Mpi<void*>::isend(nodes_, from, bytes, to, tag, request);
    if (error != 0) is_broken_ = true;
    return error == 0;
}

void FarLink::receive(uint32_t slot) {
    const int bytes = static_cast<int>(kMostRecordBytes), from = routes_.mpi_rank[peer_];
    uint64_t* const request = &slots_[slot].request;
    const int error =
        nodes_.handle_bytes == 4
            ? Mpi<int>::irecv(nodes_, in_slot(slot), bytes, from, routes_.tag, request)
            : Mpi<void*>::irecv(nodes_, in_slot(slot), bytes, from, routes_.tag, request);
    slots_[slot].is_pending = error == 0;
    if (error != 0) is_broken_ = true;
}

bool FarLink::is_done(uint64_t* request) {
    // MPI sets a failed request to MPI_REQUEST_NULL, and MPI_Test() then reports it as complete. So
    // no request is tested once the link is broken.
    if (is_broken_) return false;
    int is_done = 0;
    alignas(8) uint8_t status[kStatusBytes];
    const auto test = reinterpret_cast<int (*)(void*, int*, void*)>(nodes_.test);
    if (test(request, &is_done, status) == 0) return is_done != 0;
    is_broken_ = true;
    return false;
}

void FarLink::reap() {
    while (first_sent_ != end_sent_ && !is_broken_) {
        Sent& sent = sent_[first_sent_ % kOutUnits];
        if (!is_done(&sent.request)) return;
        reaped_ = sent.end;
        ++first_sent_;
    }
}

bool FarLink::put(RecordHead head, RecordKind kind, const void* piece, uint32_t piece_bytes) {
    reap();
    const uint32_t units = units_of(piece_bytes);
    const uint32_t to_end = kOutUnits - written_ % kOutUnits;
    const uint32_t skipped = units > to_end ? to_end : 0;
    const bool has_room = written_ + skipped + units - reaped_ <= kOutUnits &&
                          given_ + units - heard_ <= kMostUntaken;
    if (is_broken_ || !has_room) return false;
    written_ += skipped;
    uint8_t* const to = memory_ + written_ % kOutUnits * kUnit;
    head.mark = mark_of(kind, piece_bytes);
    memcpy(to, &head, sizeof(head));
    if (piece_bytes != 0) memcpy(to + sizeof(head), piece, piece_bytes);
    Sent& sent = sent_[end_sent_ % kOutUnits];
    if (!send(to, sizeof(head) + piece_bytes, &sent.request)) return false;
    written_ += units;
    given_ += units;
    sent.end = written_;
    ++end_sent_;
    return true;
}

const RecordHead* FarLink::next(uint64_t* mark) {
    say_taken();
    for (;;) {
        FarRequest& slot = slots_[at_];
        if (!is_there_) {
            if (!slot.is_pending || !is_done(&slot.request)) return nullptr;
            slot.is_pending = false;
            is_there_ = true;
        }
        const auto* head = reinterpret_cast<const RecordHead*>(in_slot(at_));
        *mark = head->mark;
        if (static_cast<uint32_t>(kind_of(*mark)) < kTaken) return head;
        hear(head);
        is_there_ = false;
        receive(at_);
        at_ = (at_ + 1) % kInSlots;
    }
}

void FarLink::take(uint64_t mark) {
    taken_ += units_of(piece_bytes_of(mark));
    is_there_ = false;
    receive(at_);
    at_ = (at_ + 1) % kInSlots;
    say_taken();
}

void FarLink::say_taken() {
    if (taken_ - said_ >= kMostUntaken / 4 && say(kTaken, taken_, nullptr, 0)) said_ = taken_;
}

bool FarLink::say(uint32_t kind, uint64_t number, const void* piece, uint32_t piece_bytes) {
    // Only the news that this rank gave up or has closed, which it sends once, may use the last
    // record.
    const uint32_t num_records = kind == kTaken ? kControlRecords - 1 : kControlRecords;
    for (uint32_t i = 0; i < num_records; ++i) {
        FarRequest& control = control_records_[i];
        if (control.is_pending && is_done(&control.request)) control.is_pending = false;
        if (control.is_pending || is_broken_) continue;
        uint8_t* const to = in_slot(kInSlots) + i * kControlRecordBytes;
        const RecordHead head = {mark_of(static_cast<RecordKind>(kind), piece_bytes), number, 0, 0,
                                 0};
        memcpy(to, &head, sizeof(head));
        if (piece_bytes != 0) memcpy(to + sizeof(head), piece, piece_bytes);
        control.is_pending = send(to, sizeof(head) + piece_bytes, &control.request);
        return control.is_pending;
    }
    return false;
}

void FarLink::hear(const RecordHead* head) {
    const auto kind = static_cast<uint32_t>(kind_of(head->mark));
    if (kind == kTaken) {
        heard_ = static_cast<uint32_t>(head->num_bytes);
    } else if (kind == kLeftRecord) {
        has_closed_ = true;
    } else {
        memcpy(&record_, head + 1, sizeof(record_));
        has_given_up_ = true;
    }
}

void FarLink::depart(KcclDeparture departure, const KcclRecord& record) {
    static_assert(sizeof(RecordHead) + sizeof(KcclRecord) <= kControlRecordBytes);
    if (departure == kKcclLeft) {
        say(kLeftRecord, 0, nullptr, 0);
    } else {
        say(kGaveUpRecord, 0, &record, sizeof(record));
    }
}

bool FarLink::is_sending() {
    reap();
    bool is_pending = first_sent_ != end_sent_;
    for (FarRequest& control : control_records_) {
        if (control.is_pending && is_done(&control.request)) control.is_pending = false;
        is_pending = is_pending || control.is_pending;
    }
    return is_pending && !is_broken_;
}

bool FarLink::close() {
    const auto cancel = reinterpret_cast<int (*)(void*)>(nodes_.cancel);
    bool is_pending = is_sending() || is_broken_;
    for (FarRequest& slot : slots_) {
        if (!slot.is_pending) continue;
        cancel(&slot.request);
        for (int i = 0; i < kLooks && slot.is_pending; ++i) {
            slot.is_pending = !is_done(&slot.request);
        }
        is_pending = is_pending || slot.is_pending;
    }
    return is_pending;
}

}  // namespace kccl::host
