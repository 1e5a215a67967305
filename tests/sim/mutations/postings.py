"""Planted bugs: small parts of calls that ranks post in their own memory."""

from .mutation import RACE, REUSED, STALE, STUCK, WRONG, Edit, bug

POSTINGS = "include/kccl/postings.cuh"
POSTED = "mem::store<mem::Order::kRelease, mem::Scope::kSystem>(&head->number, number_);"


def posting_bug(name, broken, verdicts, *edit):
    return bug(name, broken, "postings", verdicts, Edit(POSTINGS, *edit))


MUTATIONS = (
    posting_bug(
        "posting_relaxed",
        "a part is posted by a store that does not release it",
        RACE | STALE,
        POSTED,
        POSTED.replace("kRelease", "kRelaxed"),
    ),
    posting_bug(
        "posting_taken_relaxed",
        "a part is taken without an acquire",
        RACE | STALE,
        "mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(",
        "mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(",
    ),
    posting_bug(
        "posting_narrow",
        "a part is posted for this GPU only",
        frozenset({"narrow_scope"}) | RACE,
        POSTED,
        POSTED.replace("kSystem", "kDevice"),
    ),
    posting_bug(
        "posting_head_late",
        "a part is posted before its head is complete",
        RACE | STALE,
        "        mem::store_plain(&head->num_bytes, num_bytes);\n",
        f"        {POSTED}\n        mem::store_plain(&head->num_bytes, num_bytes);\n",
    ),
    posting_bug(
        "posting_not_awaited",
        "a part is taken that has not come",
        RACE | STALE,
        "return wait(source, [&] { return has_posted(source); });",
        "return wait(source, [&] { return has_posted(source) || true; });",
    ),
    posting_bug(
        "posting_slot_early",
        "a slot is used again while a rank may still read it",
        RACE | REUSED | STUCK | WRONG,
        "const uint64_t needed = end - SLOTS;",
        "const uint64_t needed = end - SLOTS - 1;",
    ),
    posting_bug(
        "posting_batch_short",
        "the slots of a batch's later calls are not looked at",
        RACE | REUSED | STUCK | WRONG,
        "const uint64_t needed = end - SLOTS;",
        "const uint64_t needed = number_ - SLOTS + 1;",
    ),
    posting_bug(
        "posting_slots_unguarded",
        "nobody waits until slots are free",
        RACE | REUSED | STUCK | WRONG,
        "if (source != rank_ && !wait(source, is_there)) return false;",
        "if (source > world_size_ && !wait(source, is_there)) return false;",
    ),
)
