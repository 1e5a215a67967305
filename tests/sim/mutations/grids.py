"""Planted bugs: barriers and collectives of grids."""

from .mutation import ACCEPTED_CALL, OPENED_TWICE, RACE, STALE, STUCK, TWO_WRITERS, Edit, bug

CALL = "include/kccl/one_call.cuh"
IN_KERNELS = "include/kccl/collectives/{}.cuh"
COOP = "include/kccl/coop.cuh"
GRID = "include/kccl/grid.cuh"
WINDOW = "include/kccl/window.cuh"

MUTATIONS = (
    bug(
        "grid_weight",
        "with many blocks the counter goes half a period at once",
        "reopened barriers",
        RACE,
        Edit(GRID, "step_ < kMostLead / num_blocks_ ? step_ : kMostLead / num_blocks_", "step_"),
        max_seeds=8,
    ),
    bug(
        "grid_arrive_unsynced",
        "a block arrives before all its threads have written",
        "kept barrier",
        RACE,
        Edit(
            GRID,
            ("        if constexpr (kOrders) coop.sync();\n        if (leads(coop)) mem::add"),
            "        if (leads(coop)) mem::add",
        ),
    ),
    bug(
        "grid_one_unsynced",
        "a sync of one block does not sync its threads",
        "kept barrier of one block",
        RACE,
        Edit(
            GRID,
            "            if constexpr (kOrders) coop.sync();\n            return kKcclOk;",
            "            return kKcclOk;",
        ),
    ),
    bug(
        "grid_leave_unsynced",
        "a block's threads go on before its first warp has seen all arrive",
        "kept barrier",
        RACE,
        Edit(GRID, "if (coop.any(!arrived)) status_", "if (!arrived) status_"),
    ),
    bug(
        "grid_absent_once",
        "counts of absent blocks are stored for one block a thread",
        "reopened barriers",
        STUCK,
        Edit(GRID, "             absent += stride) {", "             absent += kKcclMaxBlocks) {"),
        max_seeds=5,
    ),
    bug(
        "grid_absent_from",
        "counts of the first absent blocks are not stored",
        "reopened barriers",
        STUCK,
        Edit(
            GRID,
            "num_blocks_ * (1 + block().index()) + mine",
            "num_blocks_ * (2 + block().index()) + mine",
        ),
        max_seeds=5,
    ),
    bug(
        "grid_count_of_first",
        "every block begins with the first block's count",
        "grid",
        STUCK,
        Edit(
            GRID,
            "count_ = load_count(comm, FAMILY, platform::block_in_grid());",
            "count_ = load_count(comm, FAMILY, 0);",
        ),
    ),
    bug(
        "kept_shares",
        "a barrier that is kept open has the words of grid_sync()",
        "kept barrier and others",
        RACE,
        Edit(
            GRID,
            "using GridBarrier = GridBarrierOf<kKcclGridBarriers>;",
            "using GridBarrier = GridBarrierOf<kKcclGridSyncs>;",
        ),
    ),
    bug(
        "family_lost",
        "all families of barriers have the same words",
        "kept barrier and others",
        RACE,
        Edit(
            WINDOW,
            "uint64_t(family) * (kKcclMaxBlocks + kKcclGridCounterLines) + block",
            "0 * uint64_t(family) + block",
        ),
    ),
    bug(
        "fits_one_more",
        "a message may be one element longer than a slot",
        "longest all_gather",
        TWO_WRITERS,
        Edit(
            CALL,
            "count * sizeof(T) - 1 < channel.max_bytes()",
            "(count - 1) * sizeof(T) <= channel.max_bytes()",
        ),
    ),
    *(
        bug(
            f"{collective}_one_more",
            f"{collective} takes its message to be one element shorter",
            f"longest {collective}",
            TWO_WRITERS | ACCEPTED_CALL,
            Edit(
                IN_KERNELS.format(collective),
                f"fits{fits}",
                f"fits{fits.replace('count', 'count - 1')}",
            ),
        )
        for collective, fits in (
            ("all_reduce", "<T, Op>(channel, kKcclAllReduceOneShotLl16, count)"),
            ("reduce_scatter", "<T, Op>(channel, kKernel, count, is_stride<T>(stride, 0))"),
            ("broadcast", "<T>(channel, kKernel, count, is_rank, root)"),
        )
    ),
    bug(
        "grid_unsynced",
        "a call of a grid ends without a sync of the blocks",
        "collectives of grids",
        RACE,
        Edit(
            CALL,
            "        make(opened, slice);\n    }\n    return grid_sync(comm);",
            "        return make(opened, slice);\n    }",
        ),
    ),
    bug(
        "grid_rs_stride",
        "a reduce_scatter of a grid takes a block's slice for the chunk",
        "collectives of grids",
        STALE,
        Edit(
            IN_KERNELS.format("reduce_scatter"),
            "in + slice.begin, slice.count, count);",
            "in + slice.begin, slice.count, slice.count);",
        ),
    ),
    bug(
        "grid_bcast_begin",
        "every block of a grid broadcasts the beginning of the message",
        "collectives of grids",
        STALE,
        Edit(
            IN_KERNELS.format("broadcast"),
            "channel, out + slice.begin, in + slice.begin, slice.count, root);",
            "channel, out + slice.begin, in, slice.count, root);",
        ),
    ),
    bug(
        "grid_barrier_first",
        "a barrier of a grid does not wait for the rank's other blocks",
        "barriers of grids",
        RACE,
        Edit(
            IN_KERNELS.format("barrier"),
            (
                "    const Status before = grid_sync(comm);\n"
                "    if (before != kKcclOk) return before;\n"
            ),
            "",
        ),
    ),
    bug(
        "grid_barrier_last",
        "blocks leave a barrier of a grid before the first block has",
        "barriers of grids",
        RACE,
        Edit(
            IN_KERNELS.format("barrier"),
            (
                "    if (platform::block_in_grid() == 0) barrier(block(), comm);\n"
                "    return grid_sync(comm);"
            ),
            (
                "    if (platform::block_in_grid() == 0) barrier(block(), comm);\n"
                "    return kKcclOk;"
            ),
        ),
    ),
    bug(
        "grid_barrier_relaxed",
        "a barrier of a grid orders nothing between ranks",
        "barriers of grids",
        RACE,
        Edit(
            IN_KERNELS.format("barrier"),
            "if (platform::block_in_grid() == 0) barrier(block(), comm);",
            ("if (platform::block_in_grid() == 0) barrier<mem::Order::kRelaxed>(block(), comm);"),
        ),
    ),
    bug(
        "one_channel",
        "all blocks use the same channel",
        "collectives of grids",
        TWO_WRITERS | OPENED_TWICE,
        Edit(
            COOP,
            "default_channel(Block) { return platform::block_in_grid(); }",
            "default_channel(Block) { return 0; }",
        ),
    ),
    bug(
        "grid_close_unsynced",
        "a block opens its next barrier before its leader has stored the count",
        "barriers reopened by few",
        RACE | STUCK,
        Edit(
            GRID,
            (
                "            store_count(comm_, FAMILY, absent, count_);\n"
                "        }\n        block().sync();"
            ),
            "            store_count(comm_, FAMILY, absent, count_);\n        }",
        ),
        max_seeds=50,
    ),
    bug(
        "grid_count_lost",
        "a block that reopens a barrier does not find the count of its last sync",
        "barriers reopened by few",
        RACE | STUCK,
        Edit(GRID, "if (leads(block())) store_count(comm_, FAMILY, mine, count_);", ""),
        max_seeds=50,
    ),
    *(
        bug(
            f"counters_{name}",
            broken,
            "many counters",
            RACE | STUCK,
            Edit(GRID, old, new),
            max_seeds=50,
        )
        for name, broken, old, new in (
            (
                *("one_polled", "a block waits for the first counter only"),
                *("kMostCounters == 1 || coop.index() < counters()", "coop.index() < 1"),
            ),
            (
                *("last_not_polled", "a block does not wait for the last counter"),
                *("coop.index() < counters();", "coop.index() < counters() - 1;"),
            ),
            (
                *("of_none", "nobody adds to the counters that no block has"),
                *("i < counters() && platform::block_in_grid() == 0;", "i < 0;"),
            ),
            (
                *("of_none_wrong", "a counter that no block has gets one block's share"),
                *(
                    "mem::add<kArrive, mem::Scope::kDevice>(counter(i), per_sync())",
                    "mem::add<kArrive, mem::Scope::kDevice>(counter(i), weight_)",
                ),
            ),
            (
                *("share", "the first block of a counter adds as much as the others"),
                *("return per_sync() - others * weight_;", "return weight_;"),
            ),
            (
                *("others", "a counter's first block takes one block too many to be its others"),
                *("(num_blocks_ - 1 - block) / counters()", "(num_blocks_ - block) / counters()"),
            ),
            (
                *("of_few", "blocks beyond the counters share the first one"),
                *(
                    "kKcclMaxBlocks + block % counters() * kLines",
                    "kKcclMaxBlocks + (block < counters() ? block : 0) * kLines",
                ),
            ),
            (
                *("one_acquires", "only the thread of the first counter acquires"),
                *(
                    "if constexpr (kOrders) mem::fence",
                    "if (kOrders && coop.index() < 1) mem::fence",
                ),
            ),
        )
    ),
    bug(
        "grid_await_one_thread",
        "one of the blocks does not wait",
        "kept barrier",
        RACE,
        Edit(
            GRID,
            "if (coop.index() < platform::kWarpSize) {",
            "if (coop.index() < platform::kWarpSize && platform::block_in_grid() != 1) {",
        ),
    ),
)
