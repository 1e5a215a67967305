"""Planted bugs: dispatch and combine for experts."""

from .mutation import ACCEPTED_CALL, RACE, REUSED, STALE, TWO_WRITERS, WRONG, Edit, bug

EXPERTS, DISPATCH, COMBINE = (
    f"include/kccl/{name}.cuh" for name in ("experts", "dispatch", "combine")
)
# A slot that was never set names memory that no kernel has.
BEYOND = frozenset({"out_of_bounds"})
LAYERS, BY_GRIDS = "layers of experts", "layers of experts by grids"

MUTATIONS = (
    # ---- When memory is used again
    bug(
        "experts_in_one_half",
        "a rank writes the same half in each call",
        LAYERS,
        RACE | REUSED | WRONG,
        Edit(
            EXPERTS,
            "const uint32_t half = mem::load_plain(areas.next_half()) & 1;",
            "const uint32_t half = 0;",
        ),
    ),
    bug(
        "experts_read_my_half",
        "rows are read from this rank's half, not from that of their sender",
        LAYERS,
        RACE | WRONG,
        Edit(
            EXPERTS,
            "*halves |= static_cast<uint32_t>(payloads[source]) << source;",
            "*halves |= (half ^ (source & 1u)) << source;",
        ),
    ),
    bug(
        "experts_not_synced_at_the_end",
        "a call returns before all threads of its block have taken their rows",
        LAYERS,
        RACE,
        Edit(
            EXPERTS,
            "    take(workers, halves);\n    channel.coop().sync();\n    return kKcclOk;",
            "    take(workers, halves);\n    return kKcclOk;",
        ),
    ),
    # ---- Order
    bug(
        "experts_not_awaited",
        "no packets are awaited",
        LAYERS,
        RACE | STALE | REUSED,
        Edit(
            EXPERTS,
            "if (!ll16::await_all(channel, i, payloads)) return false;",
            "for (uint64_t& payload : payloads) payload = half;",
        ),
    ),
    bug(
        "experts_unfenced",
        "the packets follow no fence",
        LAYERS,
        RACE,
        Edit(
            EXPERTS,
            "    if (leads) mem::fence<mem::Order::kRelease, mem::Scope::kSystem>();\n",
            "",
        ),
    ),
    bug(
        "experts_acquire_nothing",
        "rows are read behind relaxed packets",
        LAYERS,
        RACE,
        Edit(
            EXPERTS,
            "        if (leads) mem::fence<mem::Order::kAcquire, mem::Scope::kSystem>();\n",
            "",
        ),
    ),
    bug(
        "experts_unsynced",
        "the fence covers only what one thread has written",
        LAYERS,
        RACE,
        Edit(
            EXPERTS,
            "const Status sent = channel.leave(failed);",
            "const Status sent = failed ? kKcclAborted : channel.status();",
        ),
    ),
    bug(
        "experts_of_a_grid_read_early",
        "a block reads the rows of other blocks before these have come",
        BY_GRIDS,
        RACE,
        Edit(
            EXPERTS,
            "const Status status = grid_sync(comm);",
            "const Status status = status_of(comm);",
        ),
    ),
    bug(
        "experts_of_a_grid_end_early",
        "a block returns before the others have taken their rows",
        BY_GRIDS,
        RACE,
        Edit(
            EXPERTS,
            "take(workers, halves);\n    return grid_sync(comm);",
            "take(workers, halves);\n    return status;",
        ),
    ),
    # ---- Where rows go
    bug(
        "experts_of_the_wrong_slot",
        "combine is told a row's number instead of its slot",
        LAYERS,
        RACE | WRONG | BEYOND,
        Edit(
            DISPATCH,
            "mem::store_plain(routes.slots + mine, static_cast<int32_t>(m));",
            "mem::store_plain(routes.slots + mine, static_cast<int32_t>(row));",
        ),
    ),
    bug(
        "experts_rows_of_ranks_on_each_other",
        "every rank's rows begin at the first of the expert",
        LAYERS,
        RACE | WRONG | TWO_WRITERS,
        Edit(EXPERTS, "use(expert, source, m, before + m)", "use(expert, source, m, m)"),
    ),
    bug(
        "experts_shared_rows_left_out",
        "only the first of the warps that share an expert sends its rows",
        "layers of few experts",
        RACE | WRONG | BEYOND,
        Edit(DISPATCH, "if (m % parts != part ||", "if (part != 0 || m % parts != part ||"),
    ),
    # ---- Results
    bug(
        "experts_added_as_chosen",
        "a row's results are added in the order of the router's choices",
        LAYERS,
        WRONG,
        Edit(COMBINE, "uint64_t{j} << 4 * before", "uint64_t{j} << 4 * order.num"),
    ),
    bug(
        "experts_beyond_capacity",
        "more rows than the capacity are no error",
        "too many rows for an expert",
        ACCEPTED_CALL | RACE | BEYOND,
        Edit(DISPATCH, "if (count > experts.capacity) {", "if (count > ~0u - 1) {"),
    ),
)
