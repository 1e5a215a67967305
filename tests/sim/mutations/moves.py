"""Planted bugs: all_to_all, reduce, gather, scatter and scan."""

from .chunks import written_at_once
from .mutation import INVALID, RACE, REUSED, STALE, WRONG, Edit, bug

KERNELS = "include/kccl/kernels/{}.cuh"


def kernel_bug(name, broken, kernel, verdicts, *edits, **options):
    """A bug in a kernel's file, which the program of that name shows."""
    file = KERNELS.format(kernel)
    return bug(name, broken, kernel, verdicts, *(Edit(file, *each) for each in edits), **options)


MUTATIONS = (
    # ---- Packets
    kernel_bug(
        "all_to_all_of_one_chunk",
        "every rank is sent the chunk of the sender",
        "all_to_all_direct_ll16",
        WRONG,
        ("in + channel.receiver(k) * stride", "in + channel.comm().rank * stride"),
    ),
    kernel_bug(
        "all_to_all_by_the_length_of_the_round",
        "the length of a round is taken for the distance between chunks of the result",
        "all_to_all_direct_ll16",
        WRONG | RACE,
        ("out + source * stride", "out + source * count"),
    ),
    *(
        kernel_bug(
            f"{collective}_uncredited",
            f"a {collective} by packets sends no credit",
            f"{collective}_direct_ll16",
            REUSED | STALE,
            ("Exchange::kCredited", "Exchange::kPairwise"),
            max_seeds=12,
        )
        for collective in ("reduce", "gather", "scatter")
    ),
    kernel_bug(
        "reduce_pairwise_to_the_root_only",
        "ranks that are not the root send each other nothing, and wait for the root alone",
        "reduce_pairwise_ll16",
        REUSED | STALE,
        (
            "if (channel.receiver(k) != root) ll16::push_to(channel, k, 0, 0);",
            "if (rank == root && channel.receiver(k) != root) ll16::push_to(channel, k, 0, 0);",
        ),
        (
            "return ll16::await_all(channel, 0, empty);",
            "return ll16::await_one(channel, root, 0, &empty[0]);",
        ),
        max_seeds=12,
    ),
    kernel_bug(
        "reduce_pairwise_that_does_not_wait",
        "ranks that are not the root wait for nobody, and give no credit",
        "reduce_pairwise_ll16",
        REUSED | STALE,
        ("return ll16::await_all(channel, 0, empty);", "(void)empty;\n            return true;"),
        max_seeds=12,
    ),
    kernel_bug(
        "scatter_of_the_roots_chunk",
        "every rank is sent the root's own chunk",
        "scatter_direct_ll16",
        WRONG,
        ("in + channel.receiver(k) * stride", "in + root * stride"),
    ),
    kernel_bug(
        "scan_of_all",
        "every rank gets the reduction of all ranks",
        "scan_direct_ll16",
        # An exclusive scan of rank 0 has no result, and no array for it.
        WRONG | INVALID,
        ("channel.comm().rank + 1 - exclusive", "channel.world_size() - exclusive"),
    ),
    # ---- Through the staging
    bug(
        "all_to_all_push_at_once",
        "step 0 writes what peers may still read",
        "all_to_all_push_simple",
        RACE,
        *written_at_once(KERNELS.format("all_to_all_push_simple"), "take"),
    ),
    kernel_bug(
        "reduce_push_of_this_step",
        "the inputs of this step are reduced, which may not have come",
        "reduce_two_shot_push_simple",
        RACE | STALE,
        (
            "part_of(comm.rank, parity, Half::kInput, source)",
            "part_of(comm.rank, channel.parity(), Half::kInput, source)",
        ),
    ),
    kernel_bug(
        "gather_push_into_one_part",
        "every rank writes the first part of the root's staging",
        "gather_push_simple",
        RACE | WRONG,
        (
            "Half::kResult) +\n               source * part;",
            "Half::kResult) +\n               0 * part;",
        ),
    ),
    kernel_bug(
        "scatter_push_of_this_step",
        "a rank reads the part of this step, which may not have come",
        "scatter_push_simple",
        RACE | STALE,
        ("staging_of(comm.rank, parity)", "staging_of(comm.rank, channel.parity())"),
    ),
    kernel_bug(
        "scan_push_not_to_the_last",
        "the last rank is sent nothing",
        "scan_push_simple",
        WRONG | RACE | STALE,
        ("world_size - 1 - comm.rank, [&]", "world_size - 2 - comm.rank, [&]"),
    ),
)
