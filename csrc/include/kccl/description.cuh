// A rank describes its call, so that its peers can compare it with theirs. This is done only on
// CPUs. A description lies in the cache line of a flag word, and costs no measurable time.
//
// Where the description is stored                    who reads it
//   in the line of "written", at every rank            calls that pull, before they pull
//   in the line of "credit", at every rank             the call after one that did not wait for all
//   in the rank's own line of "written", at itself     peers that have waited long; and once, those
//                                                      that have made a call of a new kind
//
// There is a description for each parity, because a rank may enter the next call before a peer has
// read the description of this one. When it enters the call after that, it knows that the peer has.
#pragma once

#include "window.cuh"

namespace kccl {

struct Description {
    uint64_t num_bytes;
    uint32_t epoch;
    uint32_t call;  // as KcclRecord.call
};
static_assert(3 * sizeof(Description) <= kKcclLineBytes, "behind the flag word, in its line");
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

// Returns `rank`'s description of its call of this epoch, which this rank has not left. The call is
// unknown if `rank` has not entered it.
KCCL_DEVICE Description described(const DeviceComm& comm, int rank, int index, uint32_t epoch) {
    const Description* slot = own_description(comm, rank, index, epoch);
    if (mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(&slot->epoch) != epoch) {
        return {0, epoch, kUnknownCall};
    }
    return {mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&slot->num_bytes), epoch,
            mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&slot->call)};
}

}  // namespace kccl
