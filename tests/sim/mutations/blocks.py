"""Planted bugs: sentinel words, launches, warps, blocks, grids and the ring of stages."""

from .mutation import (
    DIVERGENT,
    NARROW,
    RACE,
    REUSED,
    STALE,
    STUCK,
    THREADS_DIFFER,
    TWO_WRITERS,
    UNDRAINED,
    WRONG,
    Edit,
    bug,
)

TWO_SHOT = "include/kccl/kernels/all_reduce_two_shot_sentinel.cuh"

MUTATIONS = (
    # ---- Sentinels
    bug(
        "sentinel_as_data",
        "a payload that looks like the sentinel is sent as it is",
        "sentinels",
        STUCK,
        Edit(
            "include/kccl/sentinel.cuh",
            "return payload == kArmed ? payload >> 1 : payload;",
            "return payload;",
        ),
    ),
    bug(
        "one_word_of_two",
        "the second word of a packet is not tested",
        "sentinels",
        STUCK | REUSED | STALE,
        Edit(
            "include/kccl/sentinel.cuh",
            "return packet.half[0] != kArmed && packet.half[1] != kArmed;",
            "return packet.half[0] != kArmed;",
        ),
    ),
    bug(
        "rearmed_too_early",
        "the slot of the next call is armed, though peers may already push to it",
        "sentinels",
        STUCK | REUSED | STALE,
        Edit(
            "include/kccl/sentinel.cuh",
            "(calls_ % kNumSlots == 0 ? kNumSlots - 1 : -1)",
            "(calls_ % kNumSlots == 3 ? -3 : 1)",
        ),
    ),
    bug(
        "rearmed_too_late",
        "the slot of the call before the last is armed",
        "sentinels",
        STUCK | REUSED | STALE,
        Edit(
            "include/kccl/sentinel.cuh",
            "(calls_ % kNumSlots == 0 ? kNumSlots - 1 : -1)",
            "(calls_ % kNumSlots < 2 ? 2 : -2)",
        ),
    ),
    bug(
        "rearmed_unordered",
        "nothing orders the arming before later pushes",
        "sentinels",
        STUCK | REUSED,
        Edit(
            "include/kccl/sentinel.cuh",
            "if (!channel.is_ordered()) mem::fence",
            "if (false) mem::fence",
        ),
    ),
    bug(
        "kept_before_all_have_read",
        "a kernel's last call stores the state while threads still read it",
        "launches",
        RACE,
        Edit(
            "include/kccl/dependent_launch.cuh",
            "        coop.sync();\n        is_stored_",
            "        is_stored_",
        ),
    ),
    bug(
        "not_kept_by_the_last_call",
        "a kernel's last call does not store the state for the next kernel",
        "launches",
        STUCK | REUSED | STALE,
        Edit(
            "include/kccl/channel.cuh",
            "if (launch_.sent(coop_)) store_state();",
            "launch_.sent(coop_);",
        ),
    ),
    bug(
        "launch_orders_rounds",
        "a launch's later rounds are taken to be ordered as its first is",
        "sentinel launches",
        STUCK | REUSED,
        Edit(
            "include/kccl/dependent_launch.cuh",
            "is_ordered_ &= last == kKcclNumKernels;",
            "",
        ),
    ),
    bug(
        "rearmed_too_little",
        "only as many words are armed as this call has",
        "sentinels seldom long",
        STALE,
        Edit(
            "include/kccl/sentinel.cuh",
            "i < stale_packets_;",
            "i < num_packets;",
        ),
    ),
    bug(
        "two_slots",
        "only two of the sentinel slots are used",
        "sentinels",
        STUCK | REUSED | STALE,
        Edit(
            "include/kccl/sentinel.cuh",
            "calls % kKcclNumSentinelSlots,",
            "calls % 2,",
        ),
    ),
    bug(
        "results_stay_armed_late",
        "only the words of two_shot's chunks are armed again, not those of its results",
        "two shots",
        WRONG | STALE,
        Edit(TWO_SHOT, "slots.rearm(2 * chunk);", "slots.rearm(chunk);"),
    ),
    bug(
        "results_over_chunks",
        "results are pushed over the chunks",
        "two shots",
        WRONG | REUSED | STALE,
        Edit(
            TWO_SHOT,
            "slots.push(chunk + mine, sentinel::pack(results));",
            "slots.push(mine, sentinel::pack(results));",
        ),
        Edit(
            TWO_SHOT,
            "slots.await_all(chunk + (mine < chunk ? mine : chunk - 1), results);",
            "slots.await_all((mine < chunk ? mine : chunk - 1), results);",
        ),
    ),
    # ---- Blocks and warps
    bug(
        "warp_of_32",
        "warps of 64 are taken for warps of 32",
        "stream",
        DIVERGENT | RACE | THREADS_DIFFER,
        Edit(
            "include/kccl/platform.cuh",
            "constexpr uint32_t kWarpSize = KCCL_SIM_WARP_SIZE;",
            "constexpr uint32_t kWarpSize = 32;",
        ),
        warp_size=64,
    ),
    bug(
        "vote_of_32",
        "only the lower 32 bits of a warp's vote are tested",
        "reductions",
        STALE,
        Edit(
            "include/kccl/platform.cuh",
            "KCCL_DEVICE uint64_t warp_ballot(bool mine) { return kccl_sim_engine",
            "KCCL_DEVICE uint32_t warp_ballot(bool mine) { return kccl_sim_engine",
        ),
        # Runs in which only threads of the upper half still wait are rare.
        max_seeds=100,
        warp_size=64,
        packet_bytes=1024,
    ),
    bug(
        "bare_barrier",
        "a block's barrier without the fences that AMD needs",
        "barriers",
        RACE,
        Edit(
            "include/kccl/platform.cuh",
            "kccl_sim_engine->meet_block(1);",
            "kccl_sim_engine->meet_block(0);",
        ),
        model="gfx942",
    ),
    bug(
        "grid_relaxed_arrive",
        "a block of a grid_sync releases nothing",
        "grid",
        RACE,
        Edit(
            "include/kccl/grid.cuh",
            "kOrders ? mem::Order::kRelease : mem::Order::kRelaxed",
            "mem::Order::kRelaxed",
        ),
    ),
    bug(
        "grid_relaxed_await",
        "a block of a grid_sync acquires nothing",
        "grid",
        RACE,
        Edit(
            "include/kccl/grid.cuh",
            "if constexpr (kOrders) mem::fence<mem::Order::kAcquire, mem::Scope::kDevice>();",
            "",
        ),
    ),
    bug(
        "grid_of_block_scope",
        "a block's arrival has block scope",
        "grid",
        NARROW,
        Edit(
            "include/kccl/grid.cuh",
            "mem::add<kArrive, mem::Scope::kDevice>(own_",
            "mem::add<kArrive, mem::Scope::kBlock>(own_",
        ),
    ),
    bug(
        "grid_one_block_less",
        "a grid_sync does not wait for one of its blocks",
        "grid",
        RACE,
        Edit(
            "include/kccl/grid.cuh",
            "count_.total += per_sync();",
            "count_.total += per_sync() - weight_;",
        ),
    ),
    bug(
        "grid_count_not_kept",
        "a kernel does not store its count for the next kernel",
        "grid",
        RACE | STUCK,
        Edit(
            "include/kccl/grid.cuh",
            "        if (leads(block())) store_count(comm_, FAMILY, mine, count_);\n",
            "",
        ),
        max_seeds=60,
    ),
    bug(
        "absent_blocks_left_behind",
        "at its end a kernel does not advance the counts of the blocks it did not launch",
        "grids of many sizes",
        RACE | STUCK,
        Edit(
            "include/kccl/grid.cuh",
            "absent < kKcclMaxBlocks;",
            "absent < 0;",
        ),
    ),
    # ---- The ring of stages
    bug(
        "stage_not_empty",
        "the producer does not wait for an empty stage",
        "stream",
        RACE | STUCK | WRONG,
        Edit(
            "include/kccl/ring.cuh",
            "        if (platform::warp_any(!is_free)) return false;\n",
            "",
        ),
    ),
    bug(
        "stage_parity",
        "the producer waits for the wrong phase of an empty stage",
        "stream",
        RACE | STUCK,
        Edit(
            "include/kccl/ring.cuh",
            "&ring_.empty[next_.stage], next_.parity ^ 1u)",
            "&ring_.empty[next_.stage], next_.parity)",
        ),
    ),
    bug(
        "stage_round",
        "the second round of the ring has the first one's parity",
        "stream",
        RACE | STUCK | WRONG,
        Edit(
            "include/kccl/ring.cuh",
            "        parity ^= 1u;\n",
            "",
        ),
    ),
    bug(
        "stage_not_full",
        "a consumer reads before the copy is there",
        "stream",
        RACE | STUCK | WRONG,
        Edit(
            "include/kccl/ring.cuh",
            "            return is_there;\n",
            "            return true;\n",
        ),
    ),
    bug(
        "stage_tried_early",
        "a consumer that does not wait takes a stage whose copy is not there",
        "stream",
        RACE | STUCK | WRONG,
        Edit(
            "include/kccl/ring.cuh",
            "const bool is_here = mem::has_completed_now(&ring_.full[next_.stage], next_.parity);",
            "const bool is_here = true;",
        ),
    ),
    bug(
        "stage_popped_early",
        "a consuming warp lets go while its threads still read",
        "stream",
        RACE | STUCK | WRONG,
        Edit(
            "include/kccl/ring.cuh",
            "        warp().sync();\n        if (leads(warp())) mem::arrive",
            "        if (leads(warp())) mem::arrive",
        ),
    ),
    bug(
        "stage_unfenced",
        "copies may arrive before their barriers are ready",
        "stream",
        RACE,
        Edit(
            "include/kccl/ring.cuh",
            "        mem::fence_copies();\n",
            "",
        ),
    ),
    bug(
        "stage_of_one_consumer",
        "a stage counts as empty when one warp has let go",
        "stream",
        RACE | STUCK | WRONG,
        Edit(
            "include/kccl/ring.cuh",
            "mem::init_copies(&ring.empty[stage], num_consumers);",
            "mem::init_copies(&ring.empty[stage], 1);",
        ),
    ),
    bug(
        "not_drained",
        "a block ends while copies are in flight",
        "stream left",
        UNDRAINED,
        Edit(
            "include/kccl/ring.cuh",
            "while (flying_ > 0) {",
            "while (flying_ > Ring::kStages) {",
        ),
    ),
    # ---- Copies through registers
    bug(
        "copy_of_one_lane",
        "a warp's first thread completes the copy before the other threads have done their parts",
        "stream",
        RACE | WRONG,
        Edit(
            "include/kccl/targets/mem_copies.cuh",
            "    platform::sync_warp();\n    if (index == 0) settle",
            "    if (index == 0) settle",
        ),
        model="gfx942",
        warp_size=64,
    ),
    bug(
        "phase_before_its_count",
        "a phase begins before its count is stored",
        "stream",
        RACE | STUCK | WRONG | TWO_WRITERS,
        Edit(
            "include/kccl/targets/mem_copies.cuh",
            "    store_shared(&barrier->word[0], (phase >> 1) * kArrival);\n"
            "    store_shared(&barrier->word[1], phase ^ 1u);\n",
            "    store_shared(&barrier->word[1], phase ^ 1u);\n"
            "    store_shared(&barrier->word[0], (phase >> 1) * kArrival);\n",
        ),
        model="gfx942",
        warp_size=64,
        max_seeds=120,
    ),
)
