// Descriptions of calls: on CPUs a rank stores what call it makes, so that its peers can compare
// that call with their own. A description lies in the cache line of a flag word (barrier.cuh), and
// costs no measurable time.
//
// Where the description is stored                    who reads it, and when
//   in the line of "written", at every rank            a peer, before it pulls this rank's data
//   in the line of "credit", at every rank             a peer, in its next call, if this call did
//                                                      not wait for all peers
//   in the rank's own line of "written", at itself     a peer that has waited long; and a peer that
//                                                      has made a call for the first time
//
// There is a description for each parity, because a rank may enter the next call before a peer has
// read the description of this one. When it enters the call after that, it knows that the peer has.
#pragma once

#include "window.cuh"

namespace kccl {

struct Description {
    uint64_t num_bytes;
    uint32_t epoch;
    uint32_t call;  // kernel, element type, operator and root, in the form of KcclRecord.call
};
static_assert(3 * sizeof(Description) <= kKcclLineBytes, "behind the flag word, in its line");
// The value of Description::call if the call is not known.
constexpr uint32_t kUnknownCall = 255u << 24;
static_assert(kKcclNumKernels <= kUnknownCall >> 24, "a kernel has 8 bits, and 255 is no kernel");
static_assert(kKcclNumDtypes <= 256 && kKcclNumOps <= 256 && kKcclMaxWorldSize <= 256,
              "element type, operator and root have 8 bits");

KCCL_DEVICE uint32_t call_in_bits(const Call& call) {
    return call.kernel << 24 | call.dtype << 16 | call.op << 8 | static_cast<uint32_t>(call.peer);
}

KCCL_DEVICE bool are_same(const Description& a, const Description& b) {
    return a.num_bytes == b.num_bytes && a.epoch == b.epoch && a.call == b.call;
}

// Returns the address in `rank`'s scratch at which `source` describes its calls with the parity of
// `epoch` on scratch channel `index`. It lies behind the flag word of `source`.
KCCL_DEVICE Description* description_slot(const DeviceComm& comm, int rank, int index,
                                          KcclFlag flag, int source, uint32_t epoch) {
    const uint32_t parity = (epoch & comm.epoch_step) != 0 ? 1 : 0;
    uint32_t* word = flag_word(comm, rank, index, flag, source);
    return reinterpret_cast<Description*>(word) + 1 + parity;
}

// Returns the address in `rank`'s own scratch at which `rank` describes its calls. Peers may read
// it.
KCCL_DEVICE Description* own_description(const DeviceComm& comm, int rank, int index,
                                         uint32_t epoch) {
    return description_slot(comm, rank, index, kKcclFlagWritten, rank, epoch);
}

// Stores this rank's description of a call in its own scratch. The epoch is stored last, so that a
// reader that sees it gets the description of that call.
KCCL_DEVICE void describe(const DeviceComm& comm, int index, const Description& mine) {
    Description* slot = own_description(comm, comm.rank, index, mine.epoch);
    mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(&slot->num_bytes, mine.num_bytes);
    mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(&slot->call, mine.call);
    mem::store<mem::Order::kRelease, mem::Scope::kSystem>(&slot->epoch, mine.epoch);
}

// Returns `rank`'s description of its call with this epoch. The description's `call` is
// kUnknownCall if `rank` has not described that call yet. The caller must not have entered its next
// call, because then `rank` may overwrite the description.
KCCL_DEVICE Description described(const DeviceComm& comm, int rank, int index, uint32_t epoch) {
    const Description* slot = own_description(comm, rank, index, epoch);
    if (mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(&slot->epoch) != epoch) {
        return {0, epoch, kUnknownCall};
    }
    return {mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&slot->num_bytes), epoch,
            mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&slot->call)};
}

}  // namespace kccl
