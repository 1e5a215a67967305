"""Planted bugs: calls whose parts have lengths of their own."""

from sim_parts import MOVES, REDUCES

from .mutation import ACCEPTED_CALL, DIVERGENT, INVALID, RACE, STALE, WRONG, Edit, bug

PARTS = "include/kccl/parts.cuh"
KERNEL = f"include/kccl/kernels/{MOVES}.cuh"
SUMS = f"include/kccl/kernels/{REDUCES}.cuh"

MUTATIONS = (
    bug(
        "parts_at_what_is_sent",
        "the result's parts lie as those of the input",
        MOVES,
        WRONG | RACE | INVALID,
        Edit(KERNEL, "out + bytes_before(call.receives, source)", "out + source * first.count"),
    ),
    bug(
        "parts_never_repeated",
        "every rank is sent a part of its own, where all are the same",
        MOVES,
        WRONG | RACE | INVALID,
        Edit(PARTS, "call_.repeats != 0 ? 0 : ", "call_.repeats == 2 ? 0 : "),
    ),
    bug(
        "parts_rounds_of_own",
        "the rounds are counted by the longest part that this rank sends",
        MOVES,
        DIVERGENT | STALE | RACE,
        Edit(
            PARTS,
            "if (longest[source] > longest_)",
            "if (source == channel_.comm().rank && longest[source] > longest_)",
        ),
    ),
    bug(
        "parts_rest_at_once",
        "step 0 writes what peers may still read",
        MOVES,
        RACE,
        Edit(PARTS, "num_rounds + 1,", "num_rounds,"),
        Edit(PARTS, "s > 0 && s <= num_rounds", "s < num_rounds"),
        Edit(PARTS, "rest(call_.sends[peer], rounds, s - 1)", "rest(call_.sends[peer], rounds, s)"),
        Edit(PARTS, "if (s > 1) take(rounds, s - 2,", "if (s > 0) take(rounds, s - 1,"),
    ),
    bug(
        "parts_rest_of_this_step",
        "what is read may not have come yet",
        MOVES,
        RACE | STALE,
        Edit(
            PARTS,
            "(comm, rank, channel_.index(), parity, Half::kResult)",
            "(comm, rank, channel_.index(), channel_.parity(), Half::kResult)",
        ),
    ),
    bug(
        "parts_not_compared",
        "a rank takes what it does not expect",
        "parts that differ",
        ACCEPTED_CALL,
        Edit(PARTS, "are_expected = false;", "are_expected = true;"),
        Edit(PARTS, "if (heads[source] == head(call_.receives[source])) continue;", ""),
        Edit(PARTS, "refuse_call(channel_.comm()", "if (!is_head) refuse_call(channel_.comm()"),
    ),
    bug(
        "sum_of_the_first_part",
        "this rank's row of the rest is that of rank 0",
        REDUCES,
        WRONG | RACE,
        Edit(SUMS, "parts.part_for(rank) + rest.begin", "parts.part_for(0) + rest.begin"),
    ),
    bug(
        "sum_without_its_offset",
        "the rest of a sum is stored where the sum begins",
        REDUCES,
        WRONG | RACE,
        Edit(SUMS, "out + rest.begin / sizeof(T)", "out"),
    ),
)
