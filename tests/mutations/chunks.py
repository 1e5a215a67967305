"""Planted bugs: whose chunk goes where, how far chunks lie apart, and which have come."""

from .mutation import INVALID, RACE, STALE, STUCK, WRONG, Edit, bug

SCATTER = "kernels/reduce_scatter_direct_ll16.cuh"
GATHER = "kernels/all_gather_direct_ll16.cuh"
SCATTER_PULL = "kernels/reduce_scatter_pull_simple.cuh"
GATHER_PULL = "kernels/all_gather_pull_simple.cuh"

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
        "chunks are taken for as long as what one round sends of them",
        "scatters",
        WRONG | RACE,
        Edit(SCATTER, "channel.receiver(k) * stride", "channel.receiver(k) * count"),
    ),
    bug(
        "gather_by_the_length_of_the_round",
        "chunks are laid as far apart as one round is long",
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
            "(platform::kCpu || stride % kPayloadElements<T> == 0)",
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
        "a rank reduces its own chunk from where it has not put it",
        "scatter pulls",
        WRONG | STALE,
        Edit(SCATTER_PULL, "        rows[comm.rank] = in + comm.rank * stride;\n", ""),
    ),
    bug(
        "parts_by_the_length_of_the_message",
        "owners look for their parts where a longer message would have them",
        "scatter pulls",
        WRONG | STALE | RACE,
        Edit(
            SCATTER_PULL,
            "rows[rank] = part_of(rank, comm.rank);",
            "rows[rank] = part_of(rank, 0) + comm.rank * n;",
        ),
    ),
    bug(
        "gathered_before_staged",
        "a rank says that its chunk is staged, and orders nothing",
        "gather pulls",
        RACE | WRONG,
        Edit(GATHER_PULL, "arrive<mem::Order::kRelease>", "arrive<mem::Order::kRelaxed>"),
    ),
    bug(
        "gathered_from_the_next_call",
        "a rank pulls from the slot that its peers fill in the next call",
        "gather pulls",
        WRONG | RACE,
        Edit(GATHER_PULL, "channel.parity(),", "channel.parity() ^ (rank != comm.rank),"),
    ),
)  # fmt: skip
