// Receives from any rank: how the blocks of a call find out from which rank they receive.
//
// The message's first block polls the heads of the next messages of all ranks that may be its
// source. It takes the first one that has come and has the receive's tag, from the lowest rank if
// several have. A message with another tag stays in its pipe.
//
// The message's other blocks must take the same rank's. So the first block tells each of them, by a
// word in this rank's own scratch: the number of such a message, and the rank. The other block
// counts these messages in a word of its own. Both words outlast the kernel, so graphs may be
// replayed. Each has one writer, and no old value equals the next number, so nothing is scrubbed.
//
// Why the next message cannot overwrite a word that has not been read: it is another kernel's. A
// kernel that makes several such calls makes them by one coop, and then nobody is told.
#pragma once

#include "pipes.cuh"

namespace kccl {

template <class Coop>
class AnySource {
  public:
    // ranks: those from which the message may come, a bit each.
    KCCL_DEVICE AnySource(Coop coop, const DeviceComm& comm, const PipeShape& shape, int channel,
                          uint32_t ranks, const MessageHead& head)
        : coop_(coop), comm_(comm), shape_(shape), channel_(channel), ranks_(ranks), head_(head) {
        // No wait is hopeless because of this rank, and none is while another one may send.
        const uint32_t others = ranks & ~(1u << comm.rank);
        missed_ = others != 0 ? others : ranks;
    }

    // Returns the rank from which to receive, the same one in all blocks of the message, or -1 if
    // this rank has failed. Called by all threads of each block, after the call has begun.
    //
    // number: this block's number among those of the message; `blocks` is how many of them have a
    // slice. told: address of a word that gets the source plus 1 and, above 8 bits, the tag; 0:
    // none.
    KCCL_DEVICE int choose(uint32_t number, uint32_t blocks, uint64_t told) const {
        return number == 0 ? choose_first(blocks, told) : hear(number);
    }

  private:
    // The words stand in the line of pipe `number` of this rank's messages to itself that has the
    // pipe's own epochs (PipeShape::kOwn).
    static constexpr uint32_t kChosen = 2;  // written by the first block: number << 4 | rank
    static constexpr uint32_t kHeard = 3;   // written by the block itself: the last number
    static constexpr uint32_t kRankBits = 4;

    KCCL_DEVICE uint32_t* word(uint32_t which, uint32_t number) const {
        const Pipe own(comm_, shape_, comm_.rank, comm_.rank, channel_, number);
        return own.word(PipeShape::kOwn, which);
    }
    // Returns the number after another one, as many bits of it as the word has.
    KCCL_DEVICE static uint32_t after(uint32_t number) {
        return (number + 1) << kRankBits >> kRankBits;
    }

    KCCL_DEVICE Awaited awaited() const {
        return {static_cast<uint32_t>(kKcclRecvFrom), channel_, 0, Need::kAny};
    }

    KCCL_DEVICE int choose_first(uint32_t blocks, uint64_t told) const {
        // Each of the coop's first threads polls for one rank; a coop of fewer threads in turn.
        int found = -1;
        uint64_t taken = 0;
        const auto look = [&] {
            for (uint32_t p = coop_.index(); p < kKcclMaxWorldSize; p += coop_.size()) {
                if (found >= 0 || (ranks_ >> p & 1) == 0) continue;
                const auto source = static_cast<int>(p);
                const Pipe pipe(comm_, shape_, comm_.rank, source, channel_, 0);
                // The epoch of the next step from this rank.
                const uint32_t epoch =
                    mem::load_plain(pipe.word(PipeShape::kOwn, 1)) + comm_.epoch_step;
                const mem::Packet* const packet = pipe.packets(PipeShape::step_of(comm_, epoch));
                // One half of the packet has the tag. It decides nothing but the rank, whose
                // packets are then awaited, so it is loaded as a word.
                const uint64_t half =
                    mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&packet->half[1]);
                if (static_cast<uint32_t>(half >> 32) != epoch) continue;
                const MessageHead theirs = {half << 32};
                if (!head_.takes_tag(theirs)) continue;
                found = source;
                taken = theirs.word;
            }
            return found >= 0;
        };
        // Only the threads of the first warp look; all of its threads then go on together.
        bool ok = true;
        if (coop_.index() - coop_.index() % platform::kWarpSize == 0) {
            bool any = false;
            const auto poll = [&] { return any = platform::warp_any(look()); };
            ok = wait_until(comm_, awaited(), poll, [&] { return Missing{any ? 0 : missed_, 0}; });
        }
        if (coop_.any(!ok)) return -1;
        int chosen = 0;
        while (!coop_.any(found == chosen)) ++chosen;
        if (found == chosen && told != 0) {
            const MessageHead theirs = {taken};
            // The host polls the word. It says nothing of the message's bytes.
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(
                reinterpret_cast<uint32_t*>(told),
                theirs.tag() << 8 | static_cast<uint32_t>(chosen + 1));
        }
        tell(blocks, chosen);
        return chosen;
    }

    // Tells the message's other blocks which rank the first one has chosen.
    KCCL_DEVICE void tell(uint32_t blocks, int chosen) const {
        for (uint32_t number = 1 + coop_.index(); number < blocks; number += coop_.size()) {
            uint32_t* const told = word(kChosen, number);
            const uint32_t next = after(mem::load_plain(told) >> kRankBits);
            mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(
                told, next << kRankBits | static_cast<uint32_t>(chosen));
        }
    }

    // Waits until the first block has told this one which rank it has chosen.
    KCCL_DEVICE int hear(uint32_t number) const {
        const uint32_t* const told = word(kChosen, number);
        uint32_t* const heard = word(kHeard, number);
        const uint32_t next = after(mem::load_plain(heard));
        uint32_t seen = 0;
        bool has_come = false;
        const auto poll = [&] {
            seen = mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(told);
            return has_come = seen >> kRankBits == next;
        };
        const auto missing = [&] { return Missing{has_come ? 0 : missed_, 0}; };
        if (coop_.any(!wait_until(comm_, awaited(), poll, missing))) return -1;
        // All threads have loaded the old number.
        if (leads(coop_)) mem::store_plain(heard, next);
        return static_cast<int>(seen & ((1u << kRankBits) - 1));
    }

    const Coop coop_;
    const DeviceComm& comm_;
    const PipeShape& shape_;
    const int channel_;
    const uint32_t ranks_;
    uint32_t missed_;
    const MessageHead& head_;
};

}  // namespace kccl
