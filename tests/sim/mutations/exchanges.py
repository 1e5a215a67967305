"""Planted bugs: publish and collect."""

from .mutation import NARROW, RACE, REUSED, STALE, STUCK, WRONG, Edit, bug

FILE = "include/kccl/grid_exchange.cuh"
PUBLISH = "include/kccl/publish.cuh"

MUTATIONS = (
    bug(
        "exchange_without_sync",
        "a block goes on to the next exchange while its threads still collect",
        "exchanges in a row",
        REUSED | STALE | RACE | WRONG,
        Edit(FILE, "if (block().any(failed)) status_", "if (failed) status_"),
    ),
    bug(
        "exchange_in_one_slot",
        "all exchanges use the same slot of the board",
        "exchanges in a row",
        REUSED | STALE | WRONG | STUCK,
        Edit(FILE, "        offset_ += slot_packets_;\n", ""),
    ),
    bug(
        "exchange_one_half_of_two",
        "the second half of a packet is not tested",
        "exchanges",
        STALE | WRONG,
        Edit(
            "include/kccl/ll16.cuh",
            "static_cast<uint32_t>(packet.half[0] >> 32) == epoch &&\n"
            "           static_cast<uint32_t>(packet.half[1] >> 32) == epoch;",
            "static_cast<uint32_t>(packet.half[0] >> 32) == epoch;",
        ),
    ),
    bug(
        "exchange_not_scrubbed",
        "words that were not written for a whole period look valid again",
        "exchanges seldom long",
        STALE | WRONG | REUSED,
        Edit(FILE, "if ((epoch_ << 1) == 0) {", "if (epoch_ == 1) {"),
    ),
    bug(
        "exchange_scrubbed_early",
        "a board is scrubbed while blocks still collect from it",
        "exchanges seldom long",
        STUCK | REUSED | STALE | WRONG,
        Edit(FILE, "    Status status = blocks.sync();\n", "    Status status = kKcclOk;\n"),
    ),
    bug(
        "exchange_scrubbed_under_peers",
        "a peer publishes on a board that is not scrubbed yet",
        "exchanges seldom long",
        STUCK | REUSED | STALE | WRONG | RACE,
        Edit(
            FILE,
            "if (REACH == kKcclReachRank || status != kKcclOk) return status;",
            "if (platform::kWarpSize > 0 || status != kKcclOk) return status;",
        ),
    ),
    bug(
        "exchange_scrubbed_under_blocks",
        "a block publishes on a board that another one is still scrubbing",
        "exchanges seldom long",
        STUCK | REUSED | STALE | WRONG | RACE,
        Edit(FILE, "    if (status == kKcclOk) status = blocks.sync();\n", ""),
    ),
    bug(
        "exchange_releases_nothing",
        "publish() does not order what the block wrote before",
        "exchanges",
        RACE,
        Edit(
            PUBLISH,
            "        if (!is_fenced) mem::fence<mem::Order::kRelease, kScopeOf<REACH>>();\n",
            "",
        ),
    ),
    bug(
        "exchange_releases_a_thread",
        "publish() orders only what the publishing thread wrote before",
        "exchanges",
        RACE,
        Edit(
            PUBLISH,
            "    if constexpr (order == mem::Order::kAcqRel) block().sync();\n    bool",
            "    bool",
        ),
    ),
    bug(
        "exchange_acquires_nothing",
        "collect() does not order what the block reads after",
        "exchanges",
        RACE,
        Edit(
            PUBLISH,
            "    if constexpr (order == mem::Order::kAcqRel) {\n",
            "    if constexpr (false) {\n",
        ),
    ),
    bug(
        "exchange_of_device_scope",
        "packets for peers have device scope",
        "exchanges",
        NARROW,
        Edit(
            FILE,
            "REACH == kKcclReachRank ? mem::Scope::kDevice : mem::Scope::kSystem",
            "mem::Scope::kDevice",
        ),
    ),
    bug(
        "exchange_forgets_its_epoch",
        "the next kernel begins with the same epochs as the last",
        "exchanges of many sizes",
        REUSED | STALE | WRONG,
        Edit(
            FILE,
            "if (leads(block())) mem::store_plain(epoch_word(mine), epoch_);",
            "if (leads(block())) mem::store_plain(epoch_word(mine), first_epoch_);",
        ),
    ),
    bug(
        "exchange_leaves_blocks_behind",
        "at its end a kernel does not advance the epochs of the blocks it did not launch",
        "exchanges of many sizes",
        STUCK | REUSED | STALE,
        Edit(FILE, "absent < kKcclMaxBlocks;", "absent < 0;"),
    ),
    bug(
        "exchange_reduces_a_neighbour",
        "collect_reduced() takes another block's slice of the next rank",
        "reduced exchanges",
        REUSED | WRONG,
        Edit(PUBLISH, "exchange.rank_stride()}", "exchange.rank_stride() - 8}"),
    ),
    bug(
        "exchange_polls_what_nobody_sends",
        "a thread without a packet polls where none is sent",
        "reduced exchanges",
        STUCK,
        Edit(
            PUBLISH,
            "thread < total ? first : exchange.kSomePosition",
            "first",
        ),
    ),
    bug(
        "exchange_meets_nobody",
        "a block that collects a part does not wait for the other blocks",
        "parts of exchanges",
        REUSED | STALE | WRONG | STUCK,
        Edit(PUBLISH, "IS_PART && !exchange.await_previous()", "false"),
    ),
    bug(
        "exchange_meets_few",
        "a block that collects a part waits for the first block only",
        "parts of exchanges",
        REUSED | STALE | WRONG | STUCK,
        Edit(FILE, "slice < num_slices() ? slice * seen.stride", "slice < 1 ? slice * seen.stride"),
    ),
    bug(
        "exchange_meets_late",
        "the first exchange after an opening does not wait for the other blocks",
        "parts of exchanges opened anew",
        REUSED | STALE | WRONG | STUCK,
        Edit(
            FILE,
            "const Slot seen = last_.epoch == first_epoch_ ? slot() : last_;",
            "if (last_.epoch == first_epoch_) return true; const Slot seen = last_;",
        ),
    ),
    bug(
        "exchange_two_slots",
        "exchanges use only two slots",
        "parts of exchanges",
        REUSED | STALE | WRONG | STUCK,
        Edit(
            FILE,
            "offset_ == kKcclNumExchangeSlots * slot_packets_",
            "offset_ == 2 * slot_packets_",
        ),
    ),
    bug(
        "exchange_part_of_the_first",
        "a block that collects a part takes the first slices",
        "parts of exchanges",
        WRONG | REUSED,
        Edit(PUBLISH, "exchange.position_of({slices.first, 0}) + exchange", "0 + exchange"),
    ),
    bug(
        "exchange_looks_no_further_ahead",
        "after a scrub no later exchange scrubs",
        "exchanges seldom long",
        STALE | WRONG | REUSED | STUCK,
        Edit(
            FILE,
            "        }\n        find_special();\n    }\n",
            "        }\n    }\n",
        ),
    ),
)
