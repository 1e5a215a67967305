"""Planted bugs: seldom used words, sentinel words, coops, and the order of sums."""

from .mutation import OPENED_TWICE, RACE, REUSED, STALE, STUCK, TWO_WRITERS, Edit, bug

BARRIER = "include/kccl/barrier.cuh"
COOP = "include/kccl/coop.cuh"
LAUNCH = "include/kccl/dependent_launch.cuh"
REDUCE = "include/kccl/reduce.cuh"
SCRUB = "include/kccl/scrub.cuh"
SENTINEL = "include/kccl/sentinel.cuh"
WINDOW = "include/kccl/window.cuh"

MUTATIONS = (
    bug(
        "sentinel_fence_device",
        "the fence before sentinel words has device scope",
        "sentinels",
        TWO_WRITERS,
        Edit(
            SENTINEL,
            "mem::fence_packets();",
            "mem::fence<mem::Order::kAcqRel, mem::Scope::kDevice>();",
        ),
    ),
    bug(
        "rearm_not_own",
        "the words of one source are not armed again",
        "sentinels",
        STALE,
        Edit(
            SENTINEL,
            "if (source >= channel_.world_size()) break;",
            "if (source >= channel_.world_size() - 1) break;",
        ),
    ),
    bug(
        "sentinel_count_lost",
        "the last packet of a call is not armed again",
        "sentinels",
        STALE,
        Edit(
            SENTINEL,
            "        channel_.state().sentinel_packets = num_packets;\n",
            (
                "        if (channel_.state().sentinel_packets < num_packets) "
                "channel_.state().sentinel_packets = num_packets - 1;\n"
            ),
        ),
    ),
    bug(
        "disarm_first",
        "only the first word of a packet is tested for the sentinel",
        "sentinels",
        STUCK,
        Edit(SENTINEL, "disarmed(payloads[1])", "payloads[1]"),
    ),
    bug(
        "sentinel_num_floor",
        "an incomplete packet of sentinel words is not sent",
        "sentinels",
        STALE,
        Edit(SENTINEL, "(num_payloads + kPayloads - 1) / kPayloads", "num_payloads / kPayloads"),
    ),
    bug(
        "scrub_but_last",
        "the last packet of a slot is not scrubbed",
        "last words",
        STALE,
        Edit(
            SCRUB,
            "comm.layout.packet_bytes / kPayloadBytes;",
            "comm.layout.packet_bytes / kPayloadBytes - 1;",
        ),
    ),
    bug(
        "scrub_not_source",
        "the slots of the last source are not scrubbed",
        "last words",
        STALE,
        Edit(SCRUB, "source < comm.world_size; ++source", "source < comm.world_size - 1; ++source"),
    ),
    bug(
        "scrub_odd_only",
        "the slots of even calls are not scrubbed",
        "last words",
        STALE,
        Edit(SCRUB, "uint32_t parity = 0; parity < 2", "uint32_t parity = 1; parity < 2"),
    ),
    bug(
        "scrub_credit_not",
        "credits are not scrubbed",
        "broadcast seldom",
        REUSED,
        Edit(SCRUB, "int flag = kKcclFlagCredit;", "int flag = kKcclFlagWritten;"),
    ),
    bug(
        "scrub_written_not",
        "of the flags only credits are scrubbed",
        "pushes seldom",
        RACE,
        Edit(SCRUB, "flag < kKcclNumFlags; ++flag", "flag <= kKcclFlagCredit; ++flag"),
    ),
    bug(
        "await_unsynced",
        "a wait for flags ends without a sync of the coop",
        "pulls",
        RACE,
        Edit(
            BARRIER,
            "return coop.any(!arrived) ? status_of(comm) : kKcclOk;",
            "return !arrived ? status_of(comm) : kKcclOk;",
        ),
    ),
    bug(
        "warp_channel",
        "all warps of a block use the same channel",
        "by warps",
        RACE | OPENED_TWICE,
        Edit(
            COOP,
            (
                "platform::block_in_grid() * warps + platform::thread_in_block() / "
                "platform::kWarpSize;"
            ),
            "platform::block_in_grid() * warps;",
        ),
    ),
    bug(
        "warp_any_unsynced",
        "a vote of a warp orders nothing",
        "by warps",
        REUSED,
        Edit(
            COOP,
            "        platform::sync_warp();\n        return platform::warp_any(mine);",
            "        return platform::warp_any(mine);",
        ),
    ),
    bug(
        "warp_sync_none",
        "a sync of a warp orders nothing",
        "by warps",
        RACE,
        Edit(
            COOP,
            "KCCL_DEVICE void sync() const { platform::sync_warp(); }",
            "KCCL_DEVICE void sync() const {}",
        ),
    ),
    bug(
        "order_backwards",
        "a reduction goes from the last rank to the second",
        "packets read at once",
        STALE,
        Edit(
            REDUCE,
            "platform::copy_bytes(elements, &payloads[rank * stride], sizeof(result));",
            "platform::copy_bytes(elements, &payloads[(world_size - rank) * stride], 8);",
        ),
    ),
    bug(
        "sentinel_order",
        "sentinel words are added up from the rank's own neighbour on",
        "sentinels read at once",
        STALE,
        Edit(
            SENTINEL,
            "inbox[source] = inbox_ + source * slot_packets_;",
            "inbox[source] = inbox_ + channel_.receiver(source) * slot_packets_;",
        ),
    ),
    bug(
        "ordered_everywhere",
        "the first call on a channel is taken to be ordered in any kernel",
        "sentinels opened anew",
        TWO_WRITERS,
        Edit(LAUNCH, "is_ordered_(is_launch && !platform::kCpu)", "is_ordered_(!platform::kCpu)"),
    ),
    bug(
        "sentinel_slot_channel",
        "the sentinel slots of channels overlap",
        "sentinels by warps",
        TWO_WRITERS,
        Edit(
            WINDOW,
            "(uint64_t(channel) * kKcclNumSentinelSlots + turn) * comm.world_size + source",
            "(uint64_t(channel) + turn) * comm.world_size + source",
        ),
    ),
    bug(
        "rows_reduce_lost",
        "a long reduction leaves out turns of its lines",
        "pushes read at once",
        STALE,
        Edit(
            REDUCE,
            "first * kElements < count; first += kAtOnce * size",
            "first * kElements < count; first += 2 * kAtOnce * size",
        ),
    ),
)
