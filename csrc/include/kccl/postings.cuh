// Postings: small parts of calls, which a rank leaves in its own memory for those who need them.
//
// All ranks number their calls alike. In a call every rank posts once: it writes its part, which
// may be empty, into the slot of the call, and then the call's number into the head of the slot,
// with release. A rank that needs the part waits for that number, with acquire, and reads the part
// from the slot. So a rank that needs nothing waits for nobody, and may be many calls ahead.
//
// Why a slot may be used again: a rank that posts call c has taken what it needs of the calls
// before c. The slot of call c was that of call c - SLOTS. So it is free when every rank has posted
// a call after call c - SLOTS. A rank checks this once in a batch of calls, for all of its calls,
// so that it does not read the other ranks' cache lines in each call.
#pragma once

#include "mem.cuh"

namespace kccl {

// Where more ranks wait than there are cores, each gets a core in turn. The more calls a rank may
// be ahead, the more calls it makes then.
constexpr uint64_t kPostingSlots = 512;
// The length of a slot. It is an odd number of lines, so that the slots' first lines are in
// different sets of a cache.
constexpr uint64_t kPostingSlotBytes = 9 * kKcclLineBytes;

// The beginning of a slot. The part follows it.
struct PostingHead {
    uint64_t number;     // number of the call that uses the slot; 0 before the first
    uint64_t num_bytes;  // length of the whole call's message
    uint64_t call;       // other facts of the call that the ranks compare
    uint64_t history;    // a hash of num_bytes and call of this call and of all calls before it
};

// The most bytes of a part.
constexpr uint64_t kPostingBytes = kPostingSlotBytes - sizeof(PostingHead);

// One rank's view of a sequence of calls. One thread uses it.
//
// wait(source, is_there) -> bool: polls is_there() until it is true. Returns false if the wait
// failed. After a failure the memory must be cleared before it is used again.
//
// SLOTS: a multiple of 4, and at least 8. Tests have fewer than the library.
template <uint64_t SLOTS = kPostingSlots>
class Postings {
  public:
    // The length of one rank's memory for one sequence of calls. The memory must be zero at first.
    static constexpr uint64_t kBytes = SLOTS * kPostingSlotBytes;

    // parts: the address of every rank's memory, as this rank maps it; the array must outlive this
    // object. offset: where in the memory the sequence begins. number: the number of the last call,
    // or 0 if there was none.
    KCCL_DEVICE Postings(const uint64_t* parts, uint64_t offset, int rank, int world_size,
                         uint64_t number)
        : parts_(parts), offset_(offset), rank_(rank), world_size_(world_size), number_(number) {}

    // Returns the number of the call that has been begun last.
    KCCL_DEVICE uint64_t number() const { return number_; }

    // Tells whether this call is the first of a batch, which all ranks number alike.
    KCCL_DEVICE bool begins_batch() const { return number_ % kBatch == 0; }

    // Begins the next call. From here on this rank must not use parts of earlier calls. Returns
    // false when a wait has failed.
    template <class Wait>
    KCCL_DEVICE bool begin(Wait wait) {
        ++number_;
        const uint64_t end = number_ + kBatch;
        if (!begins_batch() || end <= SLOTS) return true;
        // The last call of the batch, end - 1, takes the slot of the call before this one.
        const uint64_t needed = end - SLOTS;
        for (int source = 0; source < world_size_; ++source) {
            const auto is_there = [&] { return number_of(source, needed) >= needed; };
            if (source != rank_ && !wait(source, is_there)) return false;
        }
        return true;
    }

    // Returns the address at which this rank writes its part of the call, at most kPostingBytes.
    KCCL_DEVICE uint8_t* room() const { return part_of(rank_); }

    // Posts the part that has been written at room(). num_bytes and `call` are for comparison.
    KCCL_DEVICE void post(uint64_t num_bytes, uint64_t call) const {
        PostingHead* const head = head_of(rank_, number_);
        // A plain load is enough, because only this rank writes its slots. For call 1 it reads the
        // slot of call 0, which is unused and zero.
        uint64_t history = mem::load_plain(&head_of(rank_, number_ - 1)->history);
        history = (history ^ num_bytes) * kOdd;
        history = (history ^ history >> 32 ^ call) * kOdd;
        mem::store_plain(&head->num_bytes, num_bytes);
        mem::store_plain(&head->call, call);
        mem::store_plain(&head->history, history);
        mem::store<mem::Order::kRelease, mem::Scope::kSystem>(&head->number, number_);
    }

    // Tells whether a rank has posted this call. Then its head and its part may be read until this
    // rank begins the next call.
    KCCL_DEVICE bool has_posted(int source) const { return number_of(source, number_) == number_; }

    // Waits until a rank has posted this call. Returns false if the wait has failed.
    template <class Wait>
    KCCL_DEVICE bool await(int source, Wait wait) const {
        return wait(source, [&] { return has_posted(source); });
    }

    KCCL_DEVICE const PostingHead* head(int source) const { return head_of(source, number_); }
    KCCL_DEVICE uint8_t* part_of(int source) const {
        return reinterpret_cast<uint8_t*>(head_of(source, number_) + 1);
    }

  private:
    // A batch is short, because ranks also compare their calls once in a batch.
    static constexpr uint64_t kBatch = SLOTS < 128 ? SLOTS / 4 : 32;
    // A multiplier that spreads the bits: 2^64 divided by the golden ratio.
    static constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;

    KCCL_DEVICE PostingHead* head_of(int source, uint64_t number) const {
        return reinterpret_cast<PostingHead*>(parts_[source] + offset_ +
                                              number % SLOTS * kPostingSlotBytes);
    }
    // Returns the number that stands in `source`'s slot of call `number`.
    KCCL_DEVICE uint64_t number_of(int source, uint64_t number) const {
        return mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(
            &head_of(source, number)->number);
    }

    const uint64_t* const parts_;
    const uint64_t offset_;
    const int rank_, world_size_;
    uint64_t number_;
};

}  // namespace kccl
