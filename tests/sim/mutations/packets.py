"""Planted bugs: packets, slots, epochs, the scrub and credits."""

from .mutation import RACE, REUSED, STALE, STUCK, TWO_WRITERS, WRONG, Edit, bug

MUTATIONS = (
    # ---- Packets
    bug(
        "one_slot_for_two",
        "all calls use one slot",
        "reductions",
        STUCK | REUSED,
        Edit(
            "include/kccl/channel.cuh",
            "offset_ ^= half_packets_;",
            "",
        ),
    ),
    bug(
        "parity_of_the_lowest_bit",
        "the parity of narrow epochs is taken from the wrong bit",
        "reductions",
        STUCK | REUSED,
        Edit(
            "include/kccl/channel.cuh",
            "(state_.epoch & comm_.epoch_step) != 0",
            "(state_.epoch & 1) != 0",
        ),
    ),
    bug(
        "wrong_parity",
        "packets are sent to one slot and polled in the other",
        "reductions",
        STUCK | REUSED,
        Edit(
            "include/kccl/channel.cuh",
            "return inbox_ + (offset_ + source",
            "return inbox_ + ((offset_ ^ half_packets_) + source",
        ),
    ),
    bug(
        "packets_tear_at_4_bytes",
        "v4.u32 in place of v2.b64: a half is not single-copy atomic",
        "reductions",
        STALE,
        Edit(
            "include/kccl/targets/mem_sim.cuh",
            "constexpr uint32_t kPacketUnitBytes = 8;",
            "constexpr uint32_t kPacketUnitBytes = 4;",
        ),
    ),
    bug(
        "one_flag_of_two",
        "the second half's flag is not tested",
        "reductions",
        STALE,
        Edit(
            "include/kccl/ll16.cuh",
            "    return static_cast<uint32_t>(packet.half[0] >> 32) == epoch &&\n"
            "           static_cast<uint32_t>(packet.half[1] >> 32) == epoch;\n",
            "    return static_cast<uint32_t>(packet.half[0] >> 32) == epoch;\n",
        ),
    ),
    bug(
        "flag_beside_data",
        "one half has the payload, the other the flag",
        "reductions",
        STALE,
        Edit(
            "include/kccl/ll16.cuh",
            "return {{(payload & 0xffffffffu) | flag, (payload >> 32) | flag}};",
            "return {{payload, (payload >> 32) | flag}};",
        ),
        Edit(
            "include/kccl/ll16.cuh",
            "    return static_cast<uint32_t>(packet.half[0] >> 32) == epoch &&\n"
            "           static_cast<uint32_t>(packet.half[1] >> 32) == epoch;\n",
            "    return static_cast<uint32_t>(packet.half[1] >> 32) == epoch;\n",
        ),
        Edit(
            "include/kccl/ll16.cuh",
            "return (packet.half[0] & 0xffffffffu) | (packet.half[1] << 32);",
            "return packet.half[0];",
        ),
    ),
    bug(
        "flag_not_behind",
        "a packet is valid when its flag is the epoch or a later one",
        "seldom long",
        STALE,
        Edit(
            "include/kccl/ll16.cuh",
            "    return static_cast<uint32_t>(packet.half[0] >> 32) == epoch &&\n"
            "           static_cast<uint32_t>(packet.half[1] >> 32) == epoch;\n",
            "    return static_cast<uint32_t>(packet.half[0] >> 32) >= epoch &&\n"
            "           static_cast<uint32_t>(packet.half[1] >> 32) >= epoch;\n",
        ),
    ),
    bug(
        "flag_not_ahead",
        "a packet is invalid when its flag is below the epoch",
        "seldom long",
        STALE,
        Edit(
            "include/kccl/ll16.cuh",
            "    return static_cast<uint32_t>(packet.half[0] >> 32) == epoch &&\n"
            "           static_cast<uint32_t>(packet.half[1] >> 32) == epoch;\n",
            "    return !(static_cast<uint32_t>(packet.half[0] >> 32) < epoch ||\n"
            "             static_cast<uint32_t>(packet.half[1] >> 32) < epoch);\n",
        ),
    ),
    bug(
        "one_slot_for_all_sources",
        "every source writes the same slot",
        "reductions",
        STUCK | REUSED | STALE,
        Edit(
            "include/kccl/window.cuh",
            "(uint64_t(channel) * 2 + parity) * comm.world_size + source;\n"
            "    return scratch_at<mem::Packet>",
            "(uint64_t(channel) * 2 + parity) * comm.world_size;\n"
            "    return scratch_at<mem::Packet>",
        ),
    ),
    bug(
        "slots_half_as_far_apart",
        "a source's slot begins in the middle of the one before",
        "reductions",
        STUCK | REUSED | STALE,
        Edit(
            "include/kccl/window.cuh",
            "slot * 2 * comm.layout.packet_bytes",
            "slot * comm.layout.packet_bytes",
        ),
    ),
    bug(
        "half_of_the_ranks",
        "only packets of lower ranks are waited for",
        "reductions",
        STALE,
        Edit(
            "include/kccl/exchange.cuh",
            "are_valid &= is_valid",
            "if (source < channel.comm().rank) are_valid &= is_valid",
        ),
    ),
    bug(
        "odd_tail_lost",
        "an incomplete payload at the end is not sent",
        "reductions",
        WRONG | TWO_WRITERS,
        Edit(
            "include/kccl/payload.cuh",
            "(count + kUnitElements<T> - 1) / kUnitElements<T>",
            "count / kUnitElements<T>",
        ),
    ),
    bug(
        "tail_beyond_the_end",
        "all of the last payload is stored, also what lies beyond the end",
        "reductions",
        WRONG,
        Edit(
            "include/kccl/payload.cuh",
            "if (num_elements<T>(i) + k < count) mem::store_plain",
            "mem::store_plain",
        ),
    ),
    # ---- Epochs
    bug(
        "reached_by_comparing",
        "epochs are compared without regard to the wrap",
        "barriers",
        RACE | STUCK | TWO_WRITERS,
        Edit(
            "include/kccl/wait.cuh",
            "return static_cast<int32_t>(seen - wanted) >= 0;",
            "return seen >= wanted;",
        ),
    ),
    bug(
        "reached_when_equal",
        "a peer that is one call ahead counts as not yet arrived",
        "broadcasts",
        STUCK,
        Edit(
            "include/kccl/wait.cuh",
            "return static_cast<int32_t>(seen - wanted) >= 0;",
            "return seen == wanted;",
        ),
    ),
    bug(
        "never_scrubbed",
        "slots are not scrubbed before the wrap",
        "seldom long",
        STALE,
        Edit(
            "include/kccl/channel.cuh",
            "if ((state_.epoch << 1) == 0) {",
            "if (false) {",
        ),
    ),
    bug(
        "scrubbed_by_half",
        "only one of two slots is scrubbed",
        "seldom long",
        STALE,
        Edit(
            "include/kccl/scrub.cuh",
            "for (uint32_t parity = 0; parity < 2; ++parity) {",
            "for (uint32_t parity = 0; parity < 1; ++parity) {",
        ),
    ),
    bug(
        "scrubbed_with_this_epoch",
        "the scrub marks words as this call's",
        "seldom long",
        STALE,
        Edit(
            "include/kccl/scrub.cuh",
            "static_cast<uint64_t>(past) << 32",
            "static_cast<uint64_t>(epoch) << 32",
        ),
    ),
    bug(
        "scrub_without_barrier",
        "peers may push while a rank still scrubs",
        "reductions",
        STUCK | REUSED,
        Edit(
            "include/kccl/scrub.cuh",
            "    arrive<mem::Order::kRelease>(coop, comm, index, kKcclFlagBarrier, epoch);\n"
            "    return await<mem::Order::kAcquire>("
            "coop, comm, index, kKcclFlagBarrier, awaited, 0,\n"
            "                                       comm.world_size);\n",
            "    return kKcclOk;\n",
        ),
    ),
    bug(
        "relaxed_scrub",
        "the scrub's barrier releases nothing",
        "reductions",
        STUCK | REUSED,
        Edit(
            "include/kccl/scrub.cuh",
            "arrive<mem::Order::kRelease>(coop, comm, index, kKcclFlagBarrier, epoch);",
            "coop.sync();\n"
            "    arrive<mem::Order::kRelaxed>(coop, comm, index, kKcclFlagBarrier, epoch);",
        ),
    ),
    bug(
        "epoch_by_every_thread",
        "every thread writes the channel's epoch",
        "reductions",
        RACE,
        Edit(
            "include/kccl/channel.cuh",
            "if (leads(coop_)) mem::store_words",
            "mem::store_words",
        ),
    ),
    bug(
        "epoch_not_advanced",
        "all calls have one epoch",
        "reductions",
        STUCK | REUSED | STALE,
        Edit(
            "include/kccl/channel.cuh",
            "state_.epoch += step_;",
            "",
        ),
    ),
    bug(
        "closed_without_sync",
        "a channel is opened again before the leader has stored its state",
        "reductions",
        RACE,
        Edit(
            "include/kccl/channel.cuh",
            "        if (!launch_.is_launch()) coop_.sync();\n",
            "",
        ),
    ),
    bug(
        "not_kept",
        "a channel's state is not stored when the channel is closed",
        "reductions",
        STUCK | REUSED | STALE,
        Edit(
            "include/kccl/channel.cuh",
            "kKcclNumKernels) return;\n        store_state();",
            "kKcclNumKernels) return;",
        ),
    ),
    bug(
        "map_changes",
        "every other call assigns a word to another thread, without a sync in between",
        "reductions",
        RACE | REUSED,
        Edit(
            "include/kccl/channel.cuh",
            "if (!coop_.any(failed)) return",
            "if (!failed) return",
        ),
        Edit(
            "include/kccl/exchange.cuh",
            "const uint32_t first = channel.thread();",
            "const uint32_t first = (channel.thread() + channel.parity()) % size;",
        ),
    ),
    # ---- Credits
    bug(
        "broadcast_without_credit",
        "the root does not learn who has read",
        "broadcasts",
        STUCK | REUSED,
        Edit(
            "include/kccl/kernels/broadcast_direct_ll16.cuh",
            "Exchange::kCredited",
            "Exchange::kPairwise",
        ),
    ),
    bug(
        "credit_not_awaited",
        "the call after a broadcast does not wait for credits",
        "broadcasts",
        STUCK | REUSED,
        Edit(
            "include/kccl/channel.cuh",
            "} else if (state_.credit_due != 0) {",
            "} else if (false) {",
        ),
    ),
    bug(
        "credit_for_the_next_call",
        "a rank says that it has entered a call before it has",
        "broadcasts",
        STUCK | REUSED,
        Edit(
            "include/kccl/channel.cuh",
            "arrive<kCreditArrive>(kKcclFlagCredit);",
            "kccl::arrive<kCreditArrive>(coop_, comm_, index_, kKcclFlagCredit,\n"
            "state_.epoch + step_);",
        ),
    ),
    bug(
        "credit_of_the_call_before",
        "a rank waits for the credit of the call before the one that matters",
        "broadcasts",
        STUCK | REUSED,
        Edit(
            "include/kccl/channel.cuh",
            "channel_, last_epoch,",
            "channel_, last_epoch - step_,",
        ),
    ),
    bug(
        "plain_after_credit",
        "the call after a broadcast is taken for one without anything to wait for",
        "broadcasts",
        STUCK | REUSED,
        Edit(
            "include/kccl/channel.cuh",
            "            state_.credit_due = 1;\n            special_ = state_.epoch + step_;",
            "            state_.credit_due = 1;",
        ),
    ),
)
