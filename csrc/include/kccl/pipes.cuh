// Pipes: how a rank on a GPU gives another one the bytes of a message. Nobody else takes part, and
// the two ends count their steps on their own. So a message advances no channel, and other ranks
// may make other calls meanwhile.
//
// Each rank's scratch has pipes from each source, several for each channel. A message is divided
// into slices, which blocks share, and each slice goes through a pipe of its own. Bytes go through
// a pipe in steps, which both ends number alike (e):
//
//     sender     waits until a slot is free, then writes step e into it
//     receiver   waits for step e, takes its bytes, then gives the sender the credit of e
//
// The first step of a slice is ll16 packets: the message's head, and the slice's first bytes. The
// head is how long the message is, and its tag: the receiver compares both with what it expects.
// So a short message is one step. What is left goes in steps of plain bytes: the sender copies a
// chunk, then stores "written" with release. The receiver reads it, then stores the credit with
// release.
//
// A slot may be written again when the credit has come: it says that the receiver has loaded what
// was there. Packets have four slots, and a step of packets waits for the credit of step e - 4. So
// four short messages may be under way in a pipe before the receiver comes. Plain bytes have two
// slots and wait for the credit of e - 2.
//
// Epochs wrap. A word that nobody has written for a whole period would look valid again. So twice a
// period the receiver scrubs the pipe, in as many consecutive steps as packets have slots. At the
// end of each of these steps it overwrites the packets of the step's slot with values that no later
// step takes for its own. If the step is the last one of its slice, it overwrites "written", too.
// The sender writes there again only when it has the credit of that step.
//
// Both ends keep the epoch of their last step in memory of their own, so graphs may be replayed.
#pragma once

#include "ll16.cuh"
#include "rounds.cuh"

namespace kccl {

// How long a message is, and its tag, as KcclCall has them.
struct MessageHead {
    uint64_t word;

    KCCL_DEVICE uint64_t num_bytes() const { return word & kBytes; }
    KCCL_DEVICE uint32_t tag() const { return static_cast<uint32_t>(word >> kKcclTagShift); }
    // Tells whether a receive with this head asks for the tag of the other one.
    KCCL_DEVICE bool takes_tag(const MessageHead& other) const {
        return tag() == kKcclAnyTag || tag() == other.tag();
    }
    // Tells whether a receive with this head takes a message with the other one.
    KCCL_DEVICE bool takes(const MessageHead& other) const {
        const uint64_t compared = tag() == kKcclAnyTag ? kBytes : ~uint64_t{0};
        return ((word ^ other.word) & compared) == 0;
    }

  private:
    static constexpr uint64_t kBytes = (uint64_t{1} << kKcclTagShift) - 1;
};

// The number and lengths of a communicator's pipes. They are the same on all ranks.
struct PipeShape {
    uint32_t of_channel_0;  // number of pipes from each source on channel 0
    uint32_t of_others;     // number of pipes from each source on each other channel
    uint32_t num_bytes;     // bytes of a pipe's memory
    uint32_t packet_bytes;  // most bytes of payload in the packets of one step
    uint32_t chunk_bytes;   // most bytes in a step of plain bytes

    static constexpr uint32_t kPacketSlots = 4;
    static constexpr uint32_t kChunkSlots = 2;

    // The first lines of a pipe's memory.
    enum Line : uint32_t {
        kWritten = 0,  // written by the source: the epoch of its last step of plain bytes
        kCredit = 1,   // written by the source: the epoch of the last step that it has received of
                       // this rank, by the pipe in the other direction
        kOwn = 2,      // this rank's two epochs: of its last step to the source, and from it; in
                       // pipes from itself also the two words of any_source.cuh
        kNumLines = 3
    };

    KCCL_DEVICE explicit PipeShape(const DeviceComm& comm) {
        constexpr uint32_t kLine = kKcclLineBytes;
        const auto blocks = static_cast<uint32_t>(comm.blocks_per_channel);
        of_channel_0 = blocks < kKcclMostPipes ? blocks : uint32_t{kKcclMostPipes};
        of_others = blocks < kKcclFewPipes ? blocks : uint32_t{kKcclFewPipes};
        // The memory is divided evenly among pipes whose number is a power of two, so some may be
        // unused.
        const uint32_t all = first_of(static_cast<int>(comm.num_channels));
        num_bytes = static_cast<uint32_t>(comm.layout.message_bytes);
        for (uint32_t pipes = 1; pipes < all; pipes *= 2) num_bytes /= 2;
        // The packet slots together take at most half of the pipe. Packets are twice as long as
        // their payload.
        const uint32_t most = num_bytes / (4 * kPacketSlots) / kKcclPacketUnit * kKcclPacketUnit;
        packet_bytes = static_cast<uint32_t>(comm.layout.packet_bytes);
        if (packet_bytes > most) packet_bytes = most;
        chunk_bytes = (num_bytes - kNumLines * kLine - kPacketSlots * slot_bytes()) / kChunkSlots /
                      kLine * kLine;
    }

    // Returns the number of the first pipe of a channel.
    KCCL_DEVICE uint32_t first_of(int channel) const {
        return channel == 0 ? 0 : of_channel_0 + (static_cast<uint32_t>(channel) - 1) * of_others;
    }
    // Returns the number of the step of this epoch modulo kPacketSlots, without a division.
    KCCL_DEVICE static uint32_t step_of(const DeviceComm& comm, uint32_t epoch) {
        static_assert(kPacketSlots == 4 && kChunkSlots == 2);
        const uint32_t low = (epoch & comm.epoch_step) != 0 ? 1 : 0;
        return (epoch & 2 * comm.epoch_step) != 0 ? low + 2 : low;
    }
    // Returns the length of a slot of packets.
    KCCL_DEVICE uint32_t slot_bytes() const { return 2 * packet_bytes; }

    // Returns the number of slices of a message. Sender and receiver compute the same number.
    KCCL_DEVICE uint32_t slices_of(uint64_t message_bytes, int channel) const {
        const uint32_t most = channel == 0 ? of_channel_0 : of_others;
        const uint64_t wanted = (message_bytes + kKcclPipeSliceBytes - 1) / kKcclPipeSliceBytes;
        if (wanted > most) return most;
        return wanted == 0 ? 1 : static_cast<uint32_t>(wanted);
    }
};

// One pipe, by which `rank` receives from `source`. Only computes addresses.
class Pipe {
  public:
    // `number`: the pipe's number among those of this channel.
    KCCL_DEVICE Pipe(const DeviceComm& comm, const PipeShape& shape, int rank, int source,
                     int channel, uint32_t number)
        : shape_(shape) {
        const uint64_t index = shape.first_of(channel) + number;
        // keep(): the compiler else loads the parameters that this needs after the kernel's wait.
        begin_ = mem::keep(scratch_at<uint8_t>(
            comm, rank,
            comm.layout.messages + source * comm.layout.message_bytes + index * shape.num_bytes));
    }
    KCCL_DEVICE uint32_t* word(PipeShape::Line line, uint32_t which = 0) const {
        return reinterpret_cast<uint32_t*>(begin_ + line * kLineBytes) + which;
    }
    // Return the address of the slot that a step uses. `step`: its number modulo kPacketSlots.
    KCCL_DEVICE mem::Packet* packets(uint32_t step) const {
        const uint32_t slot = step % PipeShape::kPacketSlots;
        return reinterpret_cast<mem::Packet*>(after_lines() + slot * shape_.slot_bytes());
    }
    KCCL_DEVICE uint8_t* chunk(uint32_t step) const {
        const uint32_t slot = step % PipeShape::kChunkSlots;
        return after_lines() + PipeShape::kPacketSlots * shape_.slot_bytes() +
               slot * shape_.chunk_bytes;
    }

  private:
    static constexpr uint32_t kLineBytes = kKcclLineBytes;

    KCCL_DEVICE uint8_t* after_lines() const { return begin_ + PipeShape::kNumLines * kLineBytes; }

    const PipeShape& shape_;
    uint8_t* begin_;
};

// This rank's end of the pipes for one slice of one message. Each thread of the coop makes an
// object, and all of them call its functions together. The constructor only computes addresses, so
// a kernel makes the object before it waits for the kernels before it.
template <class Coop>
class PipeEnd {
  public:
    // The number of payloads in front of the slice's bytes: the message's head, and an empty one.
    // The empty one makes the packets carry a multiple of 16 bytes of the slice, so that what
    // follows as plain bytes is aligned as the slice is.
    static constexpr uint32_t kHead = 2;

    // `kernel`: kKcclSendTo or kKcclRecvFrom.
    KCCL_DEVICE PipeEnd(Coop coop, const DeviceComm& comm, const PipeShape& shape,
                        KcclNoKernel kernel, int peer, int channel, uint32_t number)
        : coop_(coop),
          comm_(comm),
          shape_(shape),
          kernel_(kernel),
          peer_(peer),
          channel_(channel),
          mine_(comm, shape, comm.rank, peer, channel, number),
          theirs_(comm, shape, peer, comm.rank, channel, number),
          counter_(mine_.word(PipeShape::kOwn, kernel == kKcclSendTo ? 0 : 1)) {}

    // Loads what the last message left. Comes before send() and receive().
    KCCL_DEVICE void open() {
        epoch_ = mem::load_plain(counter_);
        status_ = status_of(comm_);
    }

    // Sends a slice of `count` bytes, of a message with this head. On return the slice may be
    // reused.
    KCCL_DEVICE Status send(const uint8_t* bytes, uint64_t count, const MessageHead& head) {
        const uint32_t first = in_packets(count);
        const uint32_t num = num_packets(first);
        const auto payload_of = [&](uint32_t i) {
            if (i >= kHead && i < num) return load_payload(bytes, i - kHead, first, false);
            return i == 0 ? head.word : uint64_t{0};
        };
        // The first payload is loaded before the wait for the credit, so that the two loads
        // overlap.
        uint64_t payload = payload_of(coop_.index());
        begin_step();
        const bool has_room = wait_for_room();
        if (has_room) {
            mem::Packet* packets = theirs_.packets(step());
            for (uint32_t i = coop_.index(); i < num;) {
                mem::store_packet(packets + i, ll16::pack(payload, epoch_));
                i += coop_.size();
                payload = payload_of(i);
            }
        }
        if (coop_.any(!has_room)) return status_of(comm_);
        const Rounds rounds = {count - first, shape_.chunk_bytes};
        for (uint32_t round = 0; round < rounds.number(); ++round) {
            begin_step();
            const uint32_t wanted = epoch_before(PipeShape::kChunkSlots);
            if (!wait_together(mine_.word(PipeShape::kCredit), wanted)) return status_of(comm_);
            copy(theirs_.chunk(step()), bytes + first + rounds.begin_of(round),
                 rounds.count_of(round));
            tell<mem::Order::kRelease>(PipeShape::kWritten);
        }
        return end();
    }

    // Receives a slice of `count` bytes, of a message with this head. If the sender's message has
    // another length, or a tag that the head does not take, this rank gives up, and a failed status
    // is returned.
    KCCL_DEVICE Status receive(uint8_t* bytes, uint64_t count, const MessageHead& head) {
        const uint32_t first = in_packets(count);
        const Rounds rounds = {count - first, shape_.chunk_bytes};
        const uint32_t last = rounds.number();
        begin_step();
        if (coop_.any(!take_packets(bytes, first, head))) return status_of(comm_);
        end_step<mem::Order::kRelaxed>(last == 0);
        for (uint32_t round = 0; round < last; ++round) {
            begin_step();
            if (!wait_together(mine_.word(PipeShape::kWritten), epoch_)) return status_of(comm_);
            copy(bytes + first + rounds.begin_of(round), mine_.chunk(step()),
                 rounds.count_of(round));
            end_step<mem::Order::kRelease>(round + 1 == last);
        }
        return end();
    }

  private:
    KCCL_DEVICE uint32_t step() const { return PipeShape::step_of(comm_, epoch_); }
    KCCL_DEVICE void begin_step() { epoch_ += comm_.epoch_step; }
    KCCL_DEVICE uint32_t epoch_before(uint32_t steps) const {
        return epoch_ - steps * comm_.epoch_step;
    }
    // Tells whether the communicator had not failed when this object was made; all threads of the
    // warp get the same answer. Each step asks for it late, so that other loads overlap this one.
    KCCL_DEVICE bool is_usable() const { return !has_failed_in_warp(status_ != kKcclOk); }
    // Tells whether the receiver scrubs at the end of the step of this epoch: twice a period it
    // does so in kPacketSlots steps, one for each slot of packets.
    KCCL_DEVICE bool is_scrubbed(uint32_t epoch) const {
        return (epoch << 1 >> 1) < PipeShape::kPacketSlots * comm_.epoch_step;
    }
    // Returns how many bytes of a slice are sent in packets.
    KCCL_DEVICE uint32_t in_packets(uint64_t count) const {
        const uint32_t most = shape_.packet_bytes - kHead * kPayloadBytes;
        return count < most ? static_cast<uint32_t>(count) : most;
    }
    KCCL_DEVICE static uint32_t num_packets(uint32_t first) {
        return kHead + num_payloads<uint8_t>(first);
    }
    KCCL_DEVICE Awaited awaited(uint32_t wanted) const {
        return {static_cast<uint32_t>(kernel_), channel_, wanted};
    }

    template <mem::Order order>
    KCCL_DEVICE bool wait_for(const uint32_t* word, uint32_t wanted, bool is_mine) {
        uint32_t seen = wanted;
        const auto poll = [&] {
            if (is_mine) seen = mem::load<order, mem::Scope::kSystem>(word);
            return has_reached(seen, wanted);
        };
        const auto missing = [&] {
            return Missing{has_reached(seen, wanted) ? 0 : 1u << peer_, seen};
        };
        return wait_until(comm_, awaited(wanted), poll, missing);
    }

    // Waits, in each warp, until the packets of this step may be written. The wait is relaxed,
    // because the receiver has loaded the slot's old packets before it gave the credit. If the
    // receiver has scrubbed, an acquire orders its stores before the new packets.
    KCCL_DEVICE bool wait_for_room() {
        const uint32_t* word = mine_.word(PipeShape::kCredit);
        const uint32_t wanted = epoch_before(PipeShape::kPacketSlots);
        if (!wait_for<mem::Order::kRelaxed>(word, wanted, true)) return false;
        if (!is_usable()) return false;
        if (is_scrubbed(wanted)) mem::fence<mem::Order::kAcquire, mem::Scope::kSystem>();
        return true;
    }

    // Makes the coop wait for a word of the peer, and acquires what the peer wrote before it. It is
    // also a sync. Returns false if the wait failed.
    KCCL_DEVICE bool wait_together(const uint32_t* word, uint32_t wanted) {
        return !coop_.any(!wait_for<mem::Order::kAcquire>(word, wanted, leads(coop_)));
    }

    // Synchronises the coop, then stores the epoch of this step in a word at the peer.
    template <mem::Order order>
    KCCL_DEVICE void tell(PipeShape::Line line) {
        coop_.sync();
        if (leads(coop_)) mem::store<order, mem::Scope::kSystem>(theirs_.word(line), epoch_);
    }

    // Returns a message as a record names it. The tag stands where other calls have type, operator
    // and root.
    KCCL_DEVICE Description in_record(const MessageHead& head, KcclKernel kernel) const {
        return {head.num_bytes(), epoch_, static_cast<uint32_t>(kernel) << 24 | head.tag()};
    }

    // Receives the bytes that are sent in packets. Returns false if this thread's warp has failed.
    // Each thread polls the head too: if the message is shorter than expected, the thread's own
    // packet never comes. Then this rank gives up, which ends the wait.
    KCCL_DEVICE bool take_packets(uint8_t* bytes, uint32_t first, const MessageHead& expected) {
        const mem::Packet* packets = mine_.packets(step());
        const uint32_t num = num_packets(first);
        for (uint32_t turn = 0; turn < num; turn += coop_.size()) {
            const uint32_t i = turn + coop_.index();
            const bool is_mine = i >= kHead && i < num;
            mem::Packet head, own;
            const auto is_expected = [&] {
                return expected.takes(MessageHead{ll16::unpack(head)});
            };
            const auto have_come = [&] {
                return ll16::is_valid(head, epoch_) && ll16::is_valid(own, epoch_) && is_expected();
            };
            const auto poll = [&] {
                head = mem::load_packet(packets);
                own = mem::load_packet(packets + (is_mine ? i : 0));
                if (leads(coop_) && ll16::is_valid(head, epoch_) && !is_expected()) {
                    refuse_call(comm_, awaited(epoch_), peer_, in_record(expected, kKcclRecv),
                                in_record(MessageHead{ll16::unpack(head)}, kKcclSend));
                }
                return have_come();
            };
            const auto missing = [&] {
                const mem::Packet late = ll16::is_valid(head, epoch_) ? own : head;
                return Missing{have_come() ? 0 : 1u << peer_, ll16::stale_flag(late, epoch_)};
            };
            if (!wait_until(comm_, awaited(epoch_), poll, missing)) return false;
            if (!is_usable()) return false;
            if (is_mine) store_payload(bytes, i - kHead, first, ll16::unpack(own), false);
        }
        return true;
    }

    // Gives the credit of this step; all threads have taken what came in it. order: kRelease orders
    // their loads before the credit. After a step of packets no such order is needed: each thread
    // has used the values that it loaded, so its loads are complete.
    template <mem::Order order>
    KCCL_DEVICE void end_step(bool is_last) {
        if (!is_scrubbed(epoch_)) {
            tell<order>(PipeShape::kCredit);
            return;
        }
        coop_.sync();
        const uint64_t stale = uint64_t{epoch_} << 32;
        mem::Packet* packets = mine_.packets(step());
        for (uint32_t i = coop_.index(); i < shape_.packet_bytes / kPayloadBytes;
             i += coop_.size()) {
            mem::store_packet(packets + i, mem::Packet{{stale, stale}});
        }
        // Only the last step resets "written": before that, the sender may already store its next
        // value.
        if (is_last && leads(coop_)) {
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(mine_.word(PipeShape::kWritten),
                                                                  epoch_);
        }
        tell<mem::Order::kRelease>(PipeShape::kCredit);
    }

    KCCL_DEVICE void copy(uint8_t* to, const uint8_t* from, uint32_t num_bytes) {
        copy_rows<2>(coop_.index(), coop_.size(), 1, [&](int) { return Row{to, from, num_bytes}; });
    }

    // Stores the epoch of the last step for the next message. All threads have loaded the old
    // epoch, and have synchronised since.
    KCCL_DEVICE Status end() {
        if (leads(coop_)) mem::store_plain(counter_, epoch_);
        return kKcclOk;
    }

    const Coop coop_;
    const DeviceComm& comm_;
    const PipeShape& shape_;
    const KcclNoKernel kernel_;
    const int peer_;
    const int channel_;
    const Pipe mine_;    // in this rank's scratch: what the peer sends this rank
    const Pipe theirs_;  // in the peer's scratch: what this rank sends the peer
    uint32_t* const counter_;
    uint32_t epoch_ = 0;
    Status status_ = kKcclOk;
};

}  // namespace kccl
