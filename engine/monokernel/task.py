"""Makes and reads the structs of abi.inc that the host and the monokernel exchange."""

from typing import Any

import numpy as np

from ..base.core import ffi, lib
from ..model.drafts import GPU_PACE, MOST_DRAFTS, Drafts
from ..model.ngrams import Ngrams
from ..model.ops import layer_of
from ..model.program import Program
from ..model.structs import rule_of
from .memory import Arena
from .shape import Tuning

TOKEN_BYTES: int = ffi.sizeof("KcclDecodeToken")
MAILBOX_BYTES: int = ffi.sizeof("KcclDecodeMailbox")
# kUsesBits in kernels/columns.cuh.
_USES_BITS = 16
NO_LOGITS = len(ffi.new("KcclDecodeTask *").logits) * (0,)


def new_task(copied: Any = None) -> Any:
    """Returns a copy of a KcclDecodeTask. If `copied` is None, returns a new one whose fields are
    zero.
    """
    return ffi.new("KcclDecodeTask *") if copied is None else ffi.new("KcclDecodeTask *", copied[0])


def split_off_prefill(task: Any, tuning: Tuning, passes: int) -> Any:
    """Returns the KcclDecodeTask that prefills all ids of `task` but the last, which `task` then
    begins with. Returns None if there are too few, or if a prompt runs one position at a time.

    Args:
        task: The request's KcclDecodeTask.
        tuning: The tuning of the rank's kernels.
        passes: How many passes all earlier requests had.
    """
    first, last = task.start, task.num_ids - 1
    if tuning.chunk == 1 or last - first < tuning.chunk_least:
        return None
    prefill = new_task(task)
    task.start = prefill.num_ids = last
    prefill.token_step = passes
    return prefill


def has_squads(prefill: Any, tuning: Tuning) -> bool:
    """Tells whether a KcclDecodeTask of split_off_prefill() runs in squads: with several chunks."""
    positions: int = prefill.num_ids - prefill.start
    return tuning.squads > 1 and positions > tuning.chunk


def num_passes(prefill: Any, tuning: Tuning) -> int:
    """Returns how many passes a KcclDecodeTask of split_off_prefill() has."""
    squads = tuning.squads if has_squads(prefill, tuning) else 1
    positions: int = prefill.num_ids - prefill.start
    return -(-positions // (tuning.chunk * squads))


def mailbox_at(address: int) -> Any:
    """Returns the KcclDecodeMailbox at an address."""
    return ffi.cast("KcclDecodeMailbox *", address)


def tokens_at(address: int, num: int) -> Any:
    """Returns the `num` KcclDecodeTokens at an address."""
    return ffi.cast(f"KcclDecodeToken(*)[{num}]", address)[0]


def id_and_end(token: Any) -> tuple[int, int]:
    """Returns the id of a KcclDecodeToken of a kernel with one column, and its KcclEngineEnd."""
    end, token_id = divmod(token.id_and_end, 1 << lib.kKcclDecodeEndAt)
    return token_id, end


def drafts_of(token: Any) -> tuple[int, int, bool]:
    """Returns of a KcclDecodeToken of a kernel with several columns: its id, how many drafts its
    token step had, and whether it was one of them.
    """
    told, token_id = divmod(id_and_end(token)[0], 1 << lib.kKcclDecodeDraftsAt)
    is_draft, num_drafts = divmod(told, 1 << lib.kKcclDecodeIsDraftAt - lib.kKcclDecodeDraftsAt)
    return token_id, num_drafts, bool(is_draft)


def begin(task: Any, mailbox: Any) -> None:
    """Makes `task` the next request behind those that `mailbox` has counted, without tokens."""
    _count_on(task, mailbox)
    task.number += 1
    task.max_tokens = task.only_reads = task.traced = 0
    task.most_drafts = task.draft_pace = task.num_predicted = task.rest = task.pace = 0
    task.logits = NO_LOGITS


def go_on(task: Any, mailbox: Any) -> None:
    """Makes `task` the rest of its request, which a kernel has left (kernels/leaving.cuh)."""
    _count_on(task, mailbox)
    task.start, task.rest, task.pace = mailbox.start, mailbox.rest, mailbox.pace
    mailbox.left = 0


def _count_on(task: Any, mailbox: Any) -> None:
    """Gives `task` the counters that the last kernel has left in the mailbox."""
    task.token_step, task.exchange = mailbox.token_steps, mailbox.exchanges
    # Every token step uses column 0, but kernels with one column do not count that.
    bits = task.token_step & 1 | (task.token_step >> 1 & 1) << _USES_BITS
    task.uses = mailbox.uses & ~(1 | 1 << _USES_BITS) | bits


def table_at(arena: Arena, ngrams: Ngrams | None) -> dict[str, int] | None:
    """Copies a table of n-grams into the device's memory. Returns the fields of its
    KcclEngineNgrams; None without a table.
    """
    return None if ngrams is None else ngrams.at(arena.place(ngrams.words), MOST_DRAFTS)


def give_drafts(
    task: Any, arena: Arena, drafts: Drafts, context: int, ngrams: dict[str, int] | None
) -> None:
    """Tells the kernel how a request makes drafts. `task` has its ids already.

    Args:
        task: The request's KcclDecodeTask.
        arena: Has the memory that it names.
        drafts: How drafts are made.
        context: The positions that a slot of the KV cache has room for.
        ngrams: What table_at() returns.
    """
    if ngrams is not None:
        task.ngrams = ngrams if drafts.uses_ngrams else ngrams | {"words": 0}
    task.most_drafts = drafts.most
    task.draft_pace = GPU_PACE.packed if drafts.adapts and drafts.most else 0
    some = drafts.prediction[: context - task.num_ids]
    if drafts.most and some:
        arena.write(task.ids + 4 * (context + task.num_ids), np.asarray(some, np.int32))
        task.num_predicted = task.num_ids + len(some)


def layers(program: Program) -> bytes:
    """Returns the rules of all layers' modules, in the kernel's form: KcclDecodeLayer [layers]."""

    ops = program.by_name
    ends = [kind.name for kind in layer_of(program.config) if kind.ends_module]
    rules = [
        {
            "modules": [rule_of(ops[f"layers.{i}.{name}"]) for name in ends],
            "window": ops[f"layers.{i}.attend"].window,
        }
        for i in range(program.config.num_layers)
    ]
    return bytes(ffi.buffer(ffi.new("KcclDecodeLayer[]", rules)))
