"""Runs a request whose drafts have a pace: in two kernels, which leave it to each other
(kernels/leaving.cuh).
"""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from . import task as structs
from .launching import Compiled, Grids, Launcher


def begins_with_drafts(task: Any) -> bool:
    """Tells whether the kernel with several columns runs a request first: where a prompt is left,
    of which it runs several positions at a time, and where most token steps have drafts.
    """
    has_prompt = task.start + 1 < task.num_ids
    return bool(has_prompt or task.num_predicted or task.ngrams.words)


def run(
    launcher: Launcher, grids: Grids, task: Any, mailbox: Any, kernels: Sequence[Compiled]
) -> None:
    """Launches a request's kernel, or runs it in two kernels until the last one has ended.

    Args:
        launcher, grids: The rank's.
        task: The request's KcclDecodeTask, which stays as it is.
        mailbox: The KcclDecodeMailbox that it names.
        kernels: The kernel; or the one with one column, and the one with several.
    """
    if len(kernels) == 1:
        grids.decode(kernels[0], task)
        return
    part = structs.new_task(task)
    mailbox.left = 0
    turns = cycle(reversed(kernels) if begins_with_drafts(task) else kernels)
    for each in turns:
        grids.decode(each, part)
        launcher.wait()
        # A kernel that has failed, or has ended the request, leaves it to no other.
        if mailbox.left != part.number:
            break
        structs.go_on(part, mailbox)
