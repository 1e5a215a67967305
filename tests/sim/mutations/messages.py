"""Planted bugs: messages between two ranks."""

from sim_messages import SEND_RECV

from .mutation import (
    ACCEPTED_CALL,
    RACE,
    REFUSED_CALL,
    REUSED,
    STALE,
    STUCK,
    TWO_WRITERS,
    WRONG,
    Edit,
    bug,
)

PIPES = "include/kccl/pipes.cuh"
ANY_SOURCE = "include/kccl/any_source.cuh"
KERNEL = f"include/kccl/kernels/{SEND_RECV}.cuh"
GROUPED = "grouped messages"
BURSTS = "bursts of messages"
FROM_ANY = "messages from any rank"


def pipe_bug(name, broken, verdicts, *edits, program=SEND_RECV, **options):
    """A bug in pipes.cuh."""
    return bug(name, broken, program, verdicts, *(Edit(PIPES, *each) for each in edits), **options)


def choice_bug(name, broken, verdicts, *edits):
    """A bug in any_source.cuh."""
    return bug(name, broken, FROM_ANY, verdicts, *(Edit(ANY_SOURCE, *each) for each in edits))


MUTATIONS = (
    choice_bug(
        "any_source_takes_any_tag",
        "a receive from any rank takes a message with another tag",
        REFUSED_CALL | STUCK,
        ("if (!head_.takes_tag(theirs)) continue;", ""),
    ),
    choice_bug(
        "any_source_takes_the_last_message",
        "a receive from any rank takes a head that has not come",
        STALE | STUCK,
        ("(half >> 32) != epoch", "(half >> 32) != epoch - 4 * comm_.epoch_step"),
    ),
    choice_bug(
        "any_source_of_each_block",
        "each block of a message chooses the rank",
        STUCK | STALE | RACE | REUSED | TWO_WRITERS,
        ("number == 0 ? choose_first", "true ? choose_first"),
    ),
    choice_bug(
        "any_source_told_once",
        "the other blocks hear of every message what they heard of the first",
        STUCK | STALE | RACE | WRONG,
        ("mem::store_plain(heard, next);", "mem::store_plain(heard, 0u * next);"),
    ),
    choice_bug(
        "any_source_without_tag",
        "the rank that sent a message is told with a wrong tag",
        WRONG,
        ("theirs.tag() << 8 |", "0u |"),
    ),
    pipe_bug(
        "pipe_without_credit",
        "a sender does not wait until its slot is free",
        REUSED | STALE | RACE,
        ("epoch_before(PipeShape::kPacketSlots)", "epoch_before(PipeShape::kPacketSlots + 1)"),
        program=BURSTS,
    ),
    pipe_bug(
        "pipe_chunk_without_credit",
        "a sender does not wait until its slot for plain bytes is free",
        REUSED | STALE | RACE,
        ("epoch_before(PipeShape::kChunkSlots)", "epoch_before(PipeShape::kChunkSlots + 1)"),
    ),
    pipe_bug(
        "pipe_packets_not_awaited",
        "a receiver takes packets that have not come",
        STALE | RACE,
        ("&& ll16::is_valid(own, epoch_) &&", "&&"),
    ),
    pipe_bug(
        "pipe_chunk_not_awaited",
        "a receiver takes a chunk that has not been written",
        RACE | STALE,
        ("wait_together(mine_.word(PipeShape::kWritten), epoch_)", "wait_together(counter_, 0)"),
    ),
    pipe_bug(
        "pipe_chunk_of_other_parity",
        "a receiver reads the slot of the step before",
        RACE | WRONG,
        ("mine_.chunk(step())", "mine_.chunk(step() + 1)"),
    ),
    pipe_bug(
        "pipe_packets_in_one_slot",
        "packets of all steps are in one slot",
        REUSED | STALE,
        ("after_lines() + slot * shape_.slot_bytes()", "after_lines() + 0 * slot"),
        program=BURSTS,
    ),
    pipe_bug(
        "pipe_written_relaxed",
        "what says that a chunk is there does not release it",
        RACE,
        (
            "tell<mem::Order::kRelease>(PipeShape::kWritten)",
            "tell<mem::Order::kRelaxed>(PipeShape::kWritten)",
        ),
    ),
    pipe_bug(
        "pipe_written_by_a_warp",
        "a chunk is announced before all threads have written it",
        RACE,
        (
            "coop_.sync();\n        if (leads(coop_)) mem::store<order",
            "if (leads(coop_)) mem::store<order",
        ),
    ),
    pipe_bug(
        "pipe_credit_relaxed",
        "the credit of a chunk does not release the loads of it",
        RACE,
        ("end_step<mem::Order::kRelease>(round", "end_step<mem::Order::kRelaxed>(round"),
    ),
    pipe_bug(
        "pipe_waits_relaxed",
        "what announces a chunk, or its slot, is not acquired",
        RACE | TWO_WRITERS,
        ("wait_for<mem::Order::kAcquire>", "wait_for<mem::Order::kRelaxed>"),
    ),
    pipe_bug(
        "pipe_never_scrubbed",
        "words of the period before look valid",
        STALE | STUCK | RACE,
        ("< PipeShape::kPacketSlots * comm_.epoch_step", "< 0 * comm_.epoch_step"),
    ),
    pipe_bug(
        "pipe_scrubs_one_slot",
        "the packets of one slot only are made old",
        STALE | STUCK | RACE,
        ("< PipeShape::kPacketSlots * comm_.epoch_step", "< comm_.epoch_step"),
    ),
    pipe_bug(
        "pipe_written_scrubbed_too_early",
        "the word that announces chunks is made old while the sender writes it",
        TWO_WRITERS | STUCK,
        ("if (is_last && leads(coop_)) {", "if (leads(coop_)) {"),
    ),
    pipe_bug(
        "pipe_scrub_relaxed",
        "the credit does not release the words that were made old",
        REUSED | TWO_WRITERS,
        (
            "        tell<mem::Order::kRelease>(PipeShape::kCredit);",
            "        tell<mem::Order::kRelaxed>(PipeShape::kCredit);",
        ),
    ),
    pipe_bug(
        "pipe_scrubs_packets_only",
        "the word that announces chunks is not made old",
        STALE | RACE,
        ("if (is_last && leads(coop_)) {", "if (false) {"),
        program=BURSTS,
    ),
    pipe_bug(
        "pipe_of_both_directions",
        "sending and receiving share a counter",
        STUCK | STALE | REUSED | RACE,
        ("kernel == kKcclSendTo ? 0 : 1", "kernel == kKcclSendTo ? 0 : 0"),
    ),
    pipe_bug(
        "pipe_forgets_its_steps",
        "the next message begins at the same step",
        STUCK | STALE | REUSED,
        ("mem::store_plain(counter_, epoch_);", "mem::store_plain(counter_, 0u * epoch_);"),
    ),
    pipe_bug(
        "pipe_of_all_slices",
        "the slices of a message go through one pipe",
        STUCK | STALE | REUSED | RACE | WRONG,
        ("shape.first_of(channel) + number;", "shape.first_of(channel) + 0 * number;"),
        program=GROUPED,
    ),
    pipe_bug(
        "message_not_compared",
        "a rank takes a message of another length",
        ACCEPTED_CALL | STUCK,
        ("((word ^ other.word) & compared) == 0", "compared != 0"),
        program="a message of another length",
    ),
    pipe_bug(
        "tag_not_compared",
        "a rank takes a message with another tag",
        ACCEPTED_CALL,
        ("kKcclAnyTag ? kBytes : ~uint64_t{0}", "kKcclAnyTag ? kBytes : kBytes"),
        program="a message with another tag",
    ),
    pipe_bug(
        "any_tag_compared",
        "a rank that takes any tag refuses a message with a tag",
        REFUSED_CALL,
        ("kKcclAnyTag ? kBytes : ~uint64_t{0}", "kKcclAnyTag ? ~uint64_t{0} : ~uint64_t{0}"),
        program=GROUPED,
    ),
    pipe_bug(
        "pipe_scrub_not_acquired",
        "packets are written before the words that the receiver makes old",
        TWO_WRITERS | REUSED,
        ("if (is_scrubbed(wanted)) mem::fence", "if (epoch_ == 1) mem::fence"),
        program=BURSTS,
    ),
    bug(
        "messages_without_wait",
        "a call does not wait for the kernels before it",
        "messages of dependents",
        RACE | STUCK | STALE | REUSED,
        Edit(KERNEL, "mem::await_kernels_before();\n", "\n"),
    ),
    bug(
        "messages_wait_too_late",
        "a call waits for the kernels before it when it has read its pipes' counters",
        "messages of dependents",
        RACE | STUCK | STALE | REUSED,
        Edit(
            KERNEL,
            "            begin_once();\n            end.open();\n",
            "            end.open();\n            begin_once();\n",
        ),
    ),
    bug(
        "messages_let_in_before_the_wait",
        "a call lets the next one in before it has waited itself",
        "chains of messages",
        STUCK,
        Edit(
            KERNEL,
            "mem::await_kernels_before();",
            "mem::launch_dependents(), mem::await_kernels_before();",
        ),
    ),
    bug(
        "messages_by_every_block",
        "every block makes the whole call",
        GROUPED,
        RACE | STUCK | TWO_WRITERS,
        Edit(
            KERNEL,
            "platform::block_in_grid(),\n                    platform::blocks_per_grid()",
            "0, 1",
        ),
    ),
)
