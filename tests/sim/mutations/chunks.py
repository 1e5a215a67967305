"""Planted bugs: whose chunk goes where, how far chunks lie apart, and which have arrived."""

from .mutation import INVALID, RACE, STALE, STUCK, WRONG, Edit, bug

SCATTER = "include/kccl/kernels/reduce_scatter_direct_ll16.cuh"
GATHER = "include/kccl/kernels/all_gather_direct_ll16.cuh"
SCATTER_PULL = "include/kccl/kernels/reduce_scatter_pull_simple.cuh"
GATHER_PULL = "include/kccl/kernels/all_gather_pull_simple.cuh"
SAME_CALL = "include/kccl/same_call.cuh"
SCATTER_PUSH = "include/kccl/kernels/reduce_scatter_push_simple.cuh"
GATHER_PUSH = "include/kccl/kernels/all_gather_push_simple.cuh"
BROADCAST_PUSH = "include/kccl/kernels/broadcast_push_simple.cuh"
STAGING = "include/kccl/rounds.cuh"


def written_at_once(file, take):
    """Edits of a push kernel, whose step 0 now writes what it wrote in step 1."""
    return (
        Edit(file, "num_rounds + 1,", "num_rounds,"),
        Edit(file, "s > 0 && s <= num_rounds) push(s - 1);", "s < num_rounds) push(s);"),
        Edit(file, f"s > 1) {take}(s - 2, parity);", f"s > 0) {take}(s - 1, parity);"),
    )


MUTATIONS = (
    # ---- Packets
    bug(
        "own_chunk_to_everybody",
        "every rank is sent the chunk of the sender",
        "scatters",
        WRONG,
        Edit(SCATTER, "in + channel.receiver(k) * stride", "in + channel.comm().rank * stride"),
    ),
    bug(
        "chunk_of_the_next_rank",
        "receivers are counted from the sender itself",
        "scatters",
        WRONG,
        Edit(
            "include/kccl/channel.cuh",
            "packet_slot(comm, receiver(k), index_",
            "packet_slot(comm, (comm.rank + k) % world_size(), index_",
        ),
    ),
    bug(
        "scatter_by_the_length_of_the_round",
        "the length of a round is taken for the distance between chunks of the input",
        "scatters",
        WRONG | RACE,
        Edit(SCATTER, "channel.receiver(k) * stride", "channel.receiver(k) * count"),
    ),
    bug(
        "gather_by_the_length_of_the_round",
        "the length of a round is taken for the distance between chunks of the result",
        "gathers",
        WRONG | RACE,
        Edit(GATHER, "out + source * stride", "out + source * count"),
    ),
    bug(
        "first_chunk_speaks_for_all",
        "chunks are moved as words when the first one begins at a word",
        "scatters",
        INVALID,
        Edit(
            "include/kccl/payload.cuh",
            "(platform::kCpu || stride % kUnitElements<T> == 0)",
            "true",
        ),
    ),
    bug(
        "own_chunk_not_pushed",
        "a rank waits for packets that it has not sent to itself",
        "gathers",
        STUCK,
        Edit(
            "include/kccl/exchange.cuh",
            "if (k < channel.world_size()) push_to(channel, k, i, payload);",
            "if (k < channel.world_size() - 1) push_to(channel, k, i, payload);",
        ),
    ),
    bug(
        "lanes_without_a_packet_store",
        "threads that only poll with their warp store what they polled",
        "gathers",
        RACE,
        Edit(GATHER, "if (source >= channel.world_size() || !is_mine) break;",
             "if (source >= channel.world_size()) break;"),
    ),
    # ---- Staging
    bug(
        "own_chunk_from_the_staging",
        "a rank reduces its own chunk from the staging, where it has not written it",
        "scatter pulls",
        WRONG | STALE,
        Edit(SCATTER_PULL, "        rows[comm.rank] = in + comm.rank * stride;\n", ""),
    ),
    bug(
        "parts_by_the_length_of_the_message",
        "owners take the length of a chunk for the distance between parts",
        "scatter pulls",
        WRONG | STALE | RACE,
        Edit(
            SCATTER_PULL,
            "rows[rank] = part_of(rank, comm.rank);",
            "rows[rank] = part_of(rank, 0) + comm.rank * n;",
        ),
    ),
    bug(
        "gathered_before_written",
        "a rank sets the flag of its written chunk without a release",
        "gather pulls",
        RACE | WRONG,
        Edit(SAME_CALL, "arrive<mem::Order::kRelease>", "arrive<mem::Order::kRelaxed>"),
    ),
    bug(
        "gathered_from_the_next_call",
        "a rank pulls from the slot that its peers fill in the next call",
        "gather pulls",
        WRONG | RACE,
        Edit(GATHER_PULL, "channel.parity(),", "channel.parity() ^ (rank != comm.rank),"),
    ),
    # ---- Staging of peers
    bug(
        "scattered_into_what_is_read",
        "a rank pushes chunks before it knows that their owners have read the last ones",
        "scatter pushes",
        RACE,
        *written_at_once(SCATTER_PUSH, "reduce"),
    ),
    bug(
        "gathered_into_what_is_read",
        "a rank pushes its chunk before it knows that the peers have read the last one",
        "gather pushes",
        RACE,
        *written_at_once(GATHER_PUSH, "take"),
    ),
    bug(
        "broadcast_into_what_is_read",
        "the root writes its chunks to the half into which peers forward theirs",
        "broadcast pushes",
        WRONG | RACE,
        Edit(BROADCAST_PUSH, "part_of(peer, channel.parity(), Half::kInput, peer)",
             "part_of(peer, channel.parity(), Half::kResult, peer)"),
        Edit(BROADCAST_PUSH, "part_of(mine, parity, Half::kInput, mine)",
             "part_of(mine, parity, Half::kResult, mine)"),
    ),
    bug(
        "forwarded_before_it_came",
        "a peer forwards the chunk that the root is pushing",
        "broadcast pushes",
        RACE,
        Edit(BROADCAST_PUSH, "forward(s - 1, parity)", "forward(s - 1, parity ^ 1u)"),
    ),
    bug(
        "taken_while_forwarded",
        "a peer takes the chunks that the others are forwarding",
        "broadcast pushes",
        WRONG | RACE,
        Edit(BROADCAST_PUSH, "take(s - 2, parity)", "take(s - 2, parity ^ 1u)"),
    ),
    bug(
        "read_a_step_too_late",
        "a rank takes its chunks while the peers write those of the next round but one",
        "gather pushes",
        WRONG | RACE,
        Edit(GATHER_PUSH, "num_rounds + 1,", "num_rounds + 2,"),
        Edit(GATHER_PUSH, "s > 1) take(s - 2, parity);", "s > 2) take(s - 3, parity ^ 1u);"),
    ),
    bug(
        "no_meeting_behind_the_input_half",
        "with two ranks the root does not wait until its peer has read the last round",
        "broadcast pushes of two",
        RACE,
        Edit(BROADCAST_PUSH, "num_rounds + 1,", "num_rounds + (num_peers > 1),"),
    ),
    bug(
        "steps_that_acquire_nothing",
        "a wait for the flag that parts are written acquires nothing",
        "gather pushes",
        RACE,
        Edit(STAGING, "await<mem::Order::kAcquire>", "await<mem::Order::kRelaxed>"),
    ),
    bug(
        "steps_that_do_not_wait",
        "a rank takes the peers' chunks as soon as it has pushed its own",
        "gather pushes",
        RACE,
        Edit(
            STAGING,
            "channel.template await<mem::Order::kAcquire>(kKcclFlagWritten)",
            "channel.leave()",
        ),
    ),
    bug(
        "step_of_the_wrong_parity",
        "a step reads the slots that its peers are writing",
        "gather pushes",
        RACE,
        Edit(STAGING, "parity = channel.parity();", "parity = channel.parity() ^ 1u;"),
    ),
    bug(
        "steps_in_one_slot",
        "every step of a call uses the same slots",
        "scatter pushes",
        RACE,
        Edit(
            SCATTER_PUSH,
            "(comm, rank, channel.index(), parity,",
            "(comm, rank, channel.index(), parity * 0,",
        ),
    ),
    bug(
        "rounds_that_overlap",
        "the next round begins within the last one",
        "broadcast pushes",
        WRONG | RACE,
        Edit(STAGING, "return uint64_t{round} * most;", "return uint64_t{round} * (most / 2);"),
    ),
    bug(
        "gathered_into_the_input_half",
        "chunks lie in the half into which two_shot pushes before it waits for any rank",
        "gather pushes and others",
        RACE,
        Edit(GATHER_PUSH, "Half::kResult", "Half::kInput"),
    ),
    bug(
        "pushed_chunk_of_the_sender",
        "every rank is sent the chunk of the sender",
        "scatter pushes",
        WRONG,
        Edit(SCATTER_PUSH, "in + peer * stride", "in + comm.rank * stride"),
    ),
    bug(
        "one_part_for_all",
        "all ranks push to the part of the first",
        "scatter pushes",
        RACE,
        Edit(SCATTER_PUSH, "source * part;", "0 * (source + part);"),
    ),
    bug(
        "parts_as_long_as_the_staging",
        "a round is as long as the staging, though that has a part for each rank",
        "gather pushes by warps",
        RACE,
        Edit(
            "include/kccl/window.cuh",
            "return comm.layout.staging_bytes / (uint64_t(comm.world_size) * kKcclLineBytes) *\n"
            "           kKcclLineBytes;",
            "return comm.layout.staging_bytes;",
        ),
    ),
    bug(
        "broadcast_of_any_root",
        "the first rank pushes, whoever the root is",
        "broadcast pushes",
        WRONG | INVALID,
        Edit(BROADCAST_PUSH, "comm.rank == root", "comm.rank == (root & 0)"),
    ),
)  # fmt: skip
