"""Planted bugs: lengths about whole turns of the threads, and the ends of calls."""

from .mutation import RACE, REUSED, STALE, STUCK, TWO_WRITERS, Edit, bug

BARRIER_DIRECT = "include/kccl/kernels/barrier_direct.cuh"
BROADCAST = "include/kccl/kernels/broadcast_direct_ll16.cuh"
CHANNEL = "include/kccl/channel.cuh"
EXCHANGE = "include/kccl/exchange.cuh"
ONE_SHOT = "include/kccl/kernels/all_reduce_one_shot_sentinel.cuh"
PAYLOAD = "include/kccl/payload.cuh"
ROUNDS = "include/kccl/rounds.cuh"
TWO_SHOT = "include/kccl/kernels/all_reduce_two_shot_sentinel.cuh"
TWO_SHOT_PUSH = "include/kccl/kernels/all_reduce_two_shot_push_simple.cuh"

MUTATIONS = (
    bug(
        "half_too_short",
        "the slots of the two parities overlap by those of one source",
        "packets read at once",
        TWO_WRITERS,
        Edit(
            CHANNEL,
            "half_packets_ = world_size() * slot_packets_",
            "half_packets_ = (world_size() - 1) * slot_packets_",
        ),
    ),
    bug(
        "credit_forgotten_reopened",
        "a channel that is opened again does not wait for the credits that are due",
        "broadcasts",
        REUSED,
        Edit(
            CHANNEL,
            "if (state_.credit_due != 0 || state_.epoch == step_) special_ = next_epoch;",
            "if (state_.epoch == step_) special_ = next_epoch;",
        ),
    ),
    bug(
        "credit_kept_due",
        "credits that have come stay due",
        "kinds in turn",
        STUCK,
        Edit(CHANNEL, "        state_.credit_due = 0;\n", ""),
    ),
    bug(
        "enter_is_plain",
        "calls without packets of their own never do what a special call must",
        "kinds in turn",
        STUCK,
        Edit(
            CHANNEL,
            "if (!is_next_plain()) return next(kernel, Exchange::kPairwise) == kKcclOk;",
            "",
        ),
    ),
    bug(
        "exchange_fast_special",
        "a short call by packets never does what a special call must",
        "last words",
        STALE,
        Edit(
            EXCHANGE,
            "num_packets > size ||\n        !channel.is_next_plain()",
            "num_packets > size",
        ),
    ),
    bug(
        "leave_unsynced",
        "a call ends without a sync of the coop",
        "packets read at once",
        RACE,
        Edit(CHANNEL, "if (!coop_.any(failed)) return kKcclOk;", "if (!failed) return kKcclOk;"),
    ),
    bug(
        "channel_block",
        "all blocks of a launch use the first one's part of the channel",
        "launches of blocks",
        TWO_WRITERS,
        Edit(
            CHANNEL,
            "index_ = channel * comm.blocks_per_channel + block;",
            "index_ = channel * comm.blocks_per_channel;",
        ),
    ),
    bug(
        "size_plus_one",
        "a message of one packet more than threads takes the way of short ones",
        "packets read at once",
        STALE,
        Edit(EXCHANGE, "num_packets > size ||", "num_packets > size + 1 ||"),
    ),
    bug(
        "turn_loses_last",
        "the last turn is lost if it has one packet",
        "packets read at once",
        TWO_WRITERS,
        Edit(EXCHANGE, "turn <= last && !failed", "turn < last && !failed"),
    ),
    bug(
        "turn_out_of_range",
        "in later turns threads without a packet poll where none is sent",
        "packets read at once",
        STUCK,
        Edit(
            EXCHANGE,
            "take(is_mine ? turn + first : last, is_mine, false)",
            "take(turn + first, is_mine, false)",
        ),
    ),
    bug(
        "fast_out_of_range",
        "in a short call threads without a packet poll where none is sent",
        "packets read at once",
        STUCK,
        Edit(EXCHANGE, "take(is_mine ? first : last, is_mine, true)", "take(first, is_mine, true)"),
    ),
    bug(
        "tail_as_word",
        "in a long call the last payload is stored whole",
        "packets read at once",
        STALE,
        Edit(EXCHANGE, "is_mine, false);", "is_mine, true);"),
    ),
    bug(
        "sentinel_loop_short",
        "a last turn of one packet is not awaited",
        "sentinels read at once",
        TWO_WRITERS,
        Edit(
            ONE_SHOT,
            "first < num_packets && !failed; first += size",
            "first + 1 < num_packets && !failed; first += size",
        ),
    ),
    bug(
        "sentinel_push_short",
        "the last packet is not pushed if it is not in the first turn",
        "sentinels read at once",
        STUCK,
        Edit(ONE_SHOT, "i < num_packets; i += size", "i + 1 < num_packets; i += size"),
    ),
    bug(
        "sentinel_lanes_store",
        "threads without a packet store the last one",
        "sentinels read at once",
        RACE,
        Edit(ONE_SHOT, "if (failed || i != mine) continue;", "if (failed) continue;"),
    ),
    bug(
        "two_shot_results_short",
        "a last turn of one result is not awaited",
        "two shots read at once",
        TWO_WRITERS,
        Edit(
            TWO_SHOT,
            "    channel.sent();\n    for (uint32_t first = 0; first < chunk && !failed;",
            ("    channel.sent();\n    for (uint32_t first = 0; first + 1 < chunk && !failed;"),
        ),
    ),
    bug(
        "two_shot_chunk_floor",
        "the chunks of two_shot are too short for the message",
        "two shots",
        STALE,
        Edit(
            TWO_SHOT,
            "(num_packets + world_size - 1) / world_size",
            "num_packets / world_size + (num_packets < world_size)",
        ),
    ),
    bug(
        "rounds_floor",
        "an incomplete last round is lost",
        "gather pushes",
        STALE,
        Edit(ROUNDS, "(count + most - 1) / most", "count / most + (count < most)"),
    ),
    bug(
        "chunk_each",
        "every chunk is taken to be complete",
        "pushes read at once",
        RACE,
        Edit(ROUNDS, "return begin_of(chunk + 1) - begin_of(chunk);", "return each;"),
    ),
    bug(
        "chunk_begin_unbounded",
        "empty chunks begin beyond the end",
        "pushes read at once",
        RACE,
        Edit(ROUNDS, "return chunk * each < count ? chunk * each : count;", "return chunk * each;"),
    ),
    bug(
        "rows_most_first",
        "rows are copied only as far as the first one goes",
        "pushes read at once",
        STALE,
        Edit(ROUNDS, "if (rows[k].num_bytes > most) most", "if (k == 0) most"),
    ),
    bug(
        "rows_lost_turn",
        "of rows of several turns lines are left out",
        "pushes read at once",
        STALE,
        Edit(ROUNDS, "line += kAtOnce * size", "line += (kAtOnce + 1) * size"),
    ),
    bug(
        "rows_stray",
        "lines that a thread loads at once lie side by side",
        "pushes read at once",
        RACE,
        Edit(ROUNDS, "(line + n * size) * sizeof(mem::Line)", "(line + n) * sizeof(mem::Line)"),
    ),
    bug(
        "steps_end_unsynced",
        "the last step ends without a sync of the coop",
        "pushes read at once",
        RACE,
        Edit(
            ROUNDS,
            "if (s == num_calls) return channel.leave();",
            "if (s == num_calls) return channel.status();",
        ),
    ),
    bug(
        "slice_floor",
        "what blocks cannot share out evenly is lost",
        "collectives of grids",
        STALE,
        Edit(PAYLOAD, "(num_units + blocks - 1) / blocks * kUnit", "num_units / blocks * kUnit"),
    ),
    bug(
        "order_rotated",
        "each rank adds up from its own neighbour on",
        "packets read at once",
        STALE,
        Edit(
            EXCHANGE,
            "inbox[source] = channel.inbox(source, i);",
            "inbox[source] = channel.inbox(channel.receiver(source), i);",
        ),
    ),
    bug(
        "push_order",
        "in two_shot each rank adds up from its own neighbour on",
        "pushes read at once",
        STALE,
        Edit(
            TWO_SHOT_PUSH,
            "const auto row_of = [&](int source) {",
            (
                "const auto row_of = [&](int k) {\n"
                "            const int source = channel.receiver(k);"
            ),
        ),
    ),
    bug(
        "barrier_lost_rank",
        "a barrier does not wait for the last rank",
        "barriers",
        RACE,
        Edit(
            BARRIER_DIRECT,
            "const uint32_t source = mine < world_size ? mine : world_size - 1;",
            "const uint32_t source = mine < world_size - 1 ? mine : 0;",
        ),
    ),
    bug(
        "bcast_root_sends_few",
        "the root leaves out a peer",
        "broadcasts",
        STUCK,
        Edit(
            BROADCAST,
            "if (k < channel.world_size() - 1) ll16",
            "if (k < channel.world_size() - 2) ll16",
        ),
    ),
)
