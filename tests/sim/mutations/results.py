"""Planted bugs: results that other threads read at once, and inputs that they overwrite."""

from .mutation import RACE, STALE, TWO_WRITERS, Edit, bug

KERNELS = "include/kccl/kernels"
BROADCAST = f"{KERNELS}/broadcast_direct_ll16.cuh"
BROADCAST_PUSH = f"{KERNELS}/broadcast_push_simple.cuh"
GATHER = f"{KERNELS}/all_gather_direct_ll16.cuh"
GATHER_PUSH = f"{KERNELS}/all_gather_push_simple.cuh"
ONE_SHOT = f"{KERNELS}/all_reduce_one_shot_sentinel.cuh"
SCATTER = f"{KERNELS}/reduce_scatter_direct_ll16.cuh"
SCATTER_PUSH = f"{KERNELS}/reduce_scatter_push_simple.cuh"
SENTINEL = "include/kccl/sentinel.cuh"

MUTATIONS = (
    bug(
        "scatter_order",
        "in reduce_scatter each rank adds up from its own neighbour on",
        "scatters read at once",
        STALE,
        Edit(
            SCATTER,
            "(reduced, units, kUnit, channel.world_size(), op);",
            "(reduced, turned, kUnit, channel.world_size(), op);",
        ),
        Edit(
            SCATTER,
            "uint64_t reduced[kUnit];",
            (
                "uint64_t reduced[kUnit];\n"
                "        uint64_t turned[kMaxRanks<WORLD_SIZE> * kUnit];\n"
                "        for (int k = 0; k < channel.world_size(); ++k) {\n"
                "            turned[k] = units[channel.receiver(k)];\n"
                "        }"
            ),
        ),
    ),
    bug(
        "scatter_push_order",
        "in the reduce_scatter that pushes each rank adds up from its own neighbour on",
        "scatter pushes read at once",
        STALE,
        Edit(
            SCATTER_PUSH,
            "const auto row_of = [&](int source) {",
            (
                "const auto row_of = [&](int k) {\n"
                "            const int source = channel.receiver(k);"
            ),
        ),
    ),
    bug(
        "gather_lanes_store",
        "threads without a packet store the last one of an all_gather",
        "gathers read at once",
        RACE,
        Edit(
            GATHER,
            "if (source >= channel.world_size() || !is_mine) break;",
            "if (source >= channel.world_size()) break;",
        ),
    ),
    bug(
        "gather_own_late",
        "an all_gather that pushes copies its own chunk when its last step has ended",
        "gather pushes read at once",
        RACE,
        Edit(
            GATHER_PUSH,
            "        if (mine != in) mem::copy(mine + begin, in + begin, length, thread, size);\n",
            "",
        ),
        Edit(GATHER_PUSH, "    return in_steps(", "    const Status status = in_steps("),
        Edit(
            GATHER_PUSH,
            "take(s - 2, parity);\n                    });\n",
            (
                "take(s - 2, parity);\n                    });\n"
                "    if (mine != in) mem::copy(mine, in, count, thread, size);\n"
                "    return status;\n"
            ),
        ),
    ),
    bug(
        "broadcast_lanes_store",
        "threads without a packet store the last one of a broadcast",
        "broadcasts read at once",
        RACE,
        Edit(BROADCAST, "if (is_mine) store_payload", "store_payload"),
    ),
    bug(
        "broadcast_take_late",
        "a broadcast that pushes takes the last round when its last step has ended",
        "broadcast pushes read at once",
        RACE,
        Edit(BROADCAST_PUSH, "    return in_steps(", "    const Status status = in_steps("),
        Edit(
            BROADCAST_PUSH,
            "                        if (s > 1) take(s - 2, parity);\n                    });\n",
            (
                "                        if (s > 1 && s <= num_rounds) take(s - 2, parity);\n"
                "                    });\n"
                "    if (status == kKcclOk && !is_root) take(num_rounds - 1, channel.parity());\n"
                "    return status;\n"
            ),
        ),
    ),
    bug(
        "sentinel_end_unsynced",
        "a call by sentinel words ends without a sync of the coop",
        "inputs overwritten",
        RACE,
        Edit(
            ONE_SHOT,
            "return channel.leave(failed);",
            "return failed ? channel.leave(true) : Status(kKcclOk);",
        ),
    ),
    bug(
        "sentinel_slots_shared",
        "all blocks of a call use the sentinel slots of the first",
        "sentinel launches of blocks",
        TWO_WRITERS | STALE,
        Edit(
            SENTINEL,
            "sentinel_slot(channel_.comm(), channel_.index(),",
            "sentinel_slot(channel_.comm(), channel_.awaited().channel,",
        ),
    ),
    bug(
        "last_word_not_armed",
        "the last packet of a sentinel slot is not armed again",
        "last words of sentinels",
        STALE,
        Edit(SENTINEL, "i < stale_packets_;", "i < stale_packets_ && i < 15;"),
    ),
)
