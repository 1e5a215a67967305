"""Planted bugs: what coops and ranks do behind a failure."""

from .mutation import (
    DIVERGENT,
    FAILURE,
    RACE,
    REFUSED_CALL,
    REUSED,
    STALE,
    STUCK,
    Edit,
    bug,
)

CHANNEL = "include/kccl/channel.cuh"
COLLECTIVES = "include/kccl/one_call.cuh"
EXCHANGE = "include/kccl/grid_exchange.cuh"
GRID = "include/kccl/grid.cuh"
LATCH = "include/kccl/failure_latch.cuh"
WAIT = "include/kccl/wait.cuh"

MUTATIONS = (
    bug(
        "plain_behind_failure",
        "the call behind a failed one is plain",
        "refused on an open channel",
        FAILURE,
        Edit(
            CHANNEL,
            "        latch_.fail(comm_, channel_);\n        special_ = state_.epoch + step_;\n",
            "        latch_.fail(comm_, channel_);\n",
        ),
    ),
    bug(
        "plain_at_last",
        "the second call behind a failed one is plain",
        "refused on an open channel",
        FAILURE,
        Edit(
            CHANNEL,
            "            special_ = state_.epoch + step_;\n            return status();",
            "            return status();",
        ),
    ),
    bug(
        "usable_always",
        "a thread sends although it found the communicator failed",
        "refused while blocks open",
        REUSED,
        Edit(
            LATCH, "return has_agreed_ || !has_failed_in_warp(found_ != kKcclOk);", "return true;"
        ),
    ),
    *(
        bug(
            f"{kernel}_{how}",
            f"{kernel} {words}",
            "refused while sentinels open",
            verdicts,
            Edit(
                f"include/kccl/kernels/{kernel}.cuh",
                f"if (!channel.enter({member})) return channel.leave(true);",
                instead.format(f"channel.enter({member})"),
            ),
            max_seeds=50,
        )
        for kernel, member in (
            ("all_reduce_one_shot_sentinel", "kKcclAllReduceOneShotSentinel"),
            ("all_reduce_two_shot_sentinel", "kKcclAllReduceTwoShotSentinel"),
            ("barrier_direct", "kKcclBarrierDirect"),
        )
        for how, words, verdicts, instead in (
            ("sends", "sends although a thread found the failure", REUSED | FAILURE, "(void){};"),
            (
                *("returns", "ends without the block's other warps when one finds the failure"),
                *(DIVERGENT | FAILURE, "if (!{}) return kKcclAborted;"),
            ),
        )
    ),
    bug(
        "usable_by_thread",
        "each thread of a warp decides by itself whether it may send",
        "refused while warps open",
        DIVERGENT,
        Edit(
            LATCH,
            "return has_agreed_ || !has_failed_in_warp(found_ != kKcclOk);",
            "return has_agreed_ || found_ == kKcclOk;",
        ),
        max_seeds=48,
    ),
    bug(
        "agree_by_thread",
        "each thread decides by itself whether the communicator had failed",
        "refused while channels are open",
        DIVERGENT,
        Edit(LATCH, "return !coop.any(found_ != kKcclOk);", "return found_ == kKcclOk;"),
    ),
    bug(
        "agree_never",
        "what the threads found when they opened the channel is forgotten",
        "refused while warps open",
        FAILURE,
        Edit(LATCH, "return !coop.any(found_ != kKcclOk);", "return true;"),
    ),
    bug(
        "grid_open_vote",
        "each thread decides by itself whether it may open a barrier",
        "refused beside grids",
        DIVERGENT,
        Edit(
            GRID,
            "if (block().any(status != kKcclOk || second)) status_",
            "if (status != kKcclOk) status_",
        ),
    ),
    bug(
        "exchange_open_vote",
        "each thread decides by itself whether it may open an exchange",
        "refused while exchanges open",
        DIVERGENT,
        Edit(
            EXCHANGE,
            "if (block().any(status != kKcclOk || second)) status_ = status_of(comm);",
            "if (status != kKcclOk) status_ = status_of(comm);",
        ),
    ),
    *(
        bug(
            f"second_{what}_opens",
            f"a second {what} is opened while one is open",
            f"second {what}",
            FAILURE | STUCK | STALE,
            Edit(file, f"const bool second = {test};", "const bool second = false;"),
        )
        for what, file, test in (
            ("barrier", GRID, "kIsMarked && is_second(comm, kMark, kKcclGridSync)"),
            ("exchange", EXCHANGE, "is_second(comm, kMark, kKcclGridExchange)"),
        )
    ),
    bug(
        "second_not_voted",
        "only the thread that finds a second exchange fails",
        "second exchange",
        FAILURE | DIVERGENT,
        Edit(EXCHANGE, "any(status != kKcclOk || second)", "any(status != kKcclOk)"),
        max_seeds=40,
    ),
    bug(
        "barrier_stays_marked",
        "a barrier that has ended seems open",
        "kept barrier of one block",
        REFUSED_CALL,
        Edit(GRID, "mark_open(comm_, kMark, false)", "(void)0"),
    ),
    bug(
        "exchange_stays_marked",
        "an exchange that has ended seems open",
        "parts of exchanges opened anew",
        REFUSED_CALL,
        Edit(EXCHANGE, "mark_open(comm_, kMark, false)", "(void)0"),
    ),
    bug(
        "marks_shared",
        "a barrier and an exchange have one mark",
        "refused beside open grids",
        FAILURE,
        Edit(EXCHANGE, "kMark = 1 + REACH", "kMark = 0"),
    ),
    bug(
        "refused_by_none",
        "a message that is too long is sent",
        "refused by all ranks",
        REUSED | STALE,
        Edit(
            COLLECTIVES,
            "if (is_plain & are_right) return true;",
            "if (count != 0) return true;",
        ),
    ),
    bug(
        "exchange_opens_always",
        "an exchange is opened although the communicator has failed",
        "refused beside exchanges",
        FAILURE | STUCK | STALE,
        Edit(EXCHANGE, "any(status != kKcclOk || second)", "any(second)"),
    ),
    bug(
        "next_not_checked",
        "a call enters a channel although the communicator had failed when it was opened",
        "refused among all kinds, each opened",
        FAILURE | REUSED | STALE,
        Edit(
            CHANNEL,
            "        check();\n        const bool is_plain = is_next_plain();",
            "        const bool is_plain = is_next_plain();",
        ),
    ),
    bug(
        "wait_behind_failure",
        "wait does not ask whether the communicator has failed",
        "timed out among all kinds, each opened",
        FAILURE,
        Edit(
            "include/kccl/kernels/wait.cuh",
            "    if (coop.any(status != kKcclOk)) return status_of(comm);\n",
            "",
        ),
    ),
    bug(
        "failed_vote_unsynced",
        "the threads of a warp do not see the failure for which they leave a wait",
        "no signal for threads",
        FAILURE,
        Edit(
            WAIT,
            "    platform::sync_warp();\n    return true;",
            "    return true;",
        ),
    ),
    bug(
        "status_before_vote",
        "wait asks for the status before the coop votes",
        "no signal for a block",
        FAILURE,
        Edit(
            "include/kccl/kernels/wait.cuh",
            "if (coop.any(!wait_until(comm, awaited, poll, missing))) return status_of(comm);",
            "const bool arrived = wait_until(comm, awaited, poll, missing);\n"
            "    const Status late = status_of(comm);\n"
            "    if (coop.any(!arrived)) return late;",
        ),
    ),
    bug(
        "fits_not_checked",
        "a call of no elements is ok although the communicator has failed",
        "refused while blocks open",
        FAILURE,
        Edit(COLLECTIVES, "    channel.check();\n    if (count == 0)", "    if (count == 0)"),
    ),
    bug(
        "refused_not_kept",
        "a channel forgets that it has refused a call",
        "refused among all kinds",
        FAILURE | DIVERGENT | STALE,
        Edit(COLLECTIVES, "    channel.leave(true);\n    return false;", "    return false;"),
    ),
    bug(
        "failed_wait_not_kept",
        "a channel forgets that a wait in a call has failed",
        "timed out among all kinds",
        FAILURE | DIVERGENT | STALE | REUSED,
        Edit(
            CHANNEL,
            "            if (!coop_.any(failed)) return kKcclOk;\n        }\n        fail();\n",
            "            if (!coop_.any(failed)) return kKcclOk;\n        }\n",
        ),
    ),
    bug(
        "failed_flag_not_kept",
        "a channel forgets that a wait for a flag has failed",
        "timed out among all kinds",
        FAILURE | DIVERGENT | STALE | REUSED | RACE,
        Edit(
            CHANNEL,
            "awaited(), first, last) != kKcclOk)\n            fail();",
            "awaited(), first, last) != kKcclOk)\n            return kKcclOk;",
        ),
    ),
    bug(
        "exchange_failure_not_kept",
        "an open exchange forgets that it has failed",
        "refused beside open grids",
        FAILURE | DIVERGENT | STALE,
        Edit(
            EXCHANGE,
            "if (block().any(failed)) status_ = status_of(comm_);",
            "(void)block().any(failed);",
        ),
    ),
    bug(
        "sync_failure_not_kept",
        "an open barrier forgets that a sync has failed",
        "timed out beside open grids",
        FAILURE | DIVERGENT,
        Edit(
            GRID, "if (coop.any(!arrived)) status_ = status_of(comm_);", "(void)coop.any(!arrived);"
        ),
    ),
    *(
        bug(
            f"{kernel}_behind_failure",
            f"{kernel} does not ask whether the communicator has failed",
            "refused among all kinds",
            FAILURE,
            Edit(
                f"include/kccl/kernels/{kernel}.cuh",
                "    if (coop.any(status != kKcclOk)) return status_of(comm);\n",
                "",
            ),
        )
        for kernel in ("put", "get", "signal")
    ),
    bug(
        "depart_some",
        "a rank that gives up tells higher ranks only",
        "refused on an open channel",
        FAILURE,
        Edit(
            WAIT,
            ("        if (peer == comm.rank) continue;\n        mem::store_plain(abort_record"),
            ("        if (peer <= comm.rank) continue;\n        mem::store_plain(abort_record"),
        ),
    ),
    bug(
        "look_some",
        "a wait looks whether lower ranks gave up only",
        "refused on an open channel",
        FAILURE,
        Edit(
            WAIT,
            (
                "for (int source = 0; source < comm.world_size; ++source) {\n"
                "        const uint32_t departure"
            ),
            (
                "for (int source = 0; source < comm.rank; ++source) {\n"
                "        const uint32_t departure"
            ),
        ),
    ),
    bug(
        "follow_unclaimed",
        "every thread that hears of a failure writes the record",
        "one is absent to many",
        RACE,
        Edit(
            WAIT,
            "if (!mem::claim(&state->status, static_cast<uint32_t>(kKcclAborted))) return;",
            "mem::claim(&state->status, static_cast<uint32_t>(kKcclAborted));",
        ),
    ),
)
