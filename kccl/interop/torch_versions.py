"""What differs between the versions of PyTorch that KCCL takes, from 2.11 on.

Each difference is told by a feature, not by a number. PyTorch's new names for the calls of a
process group need nothing here: GROUP_METHODS has the old and the new ones side by side.
"""

import sys
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


def other_backends(options: Any) -> dist.ProcessGroup | None:
    """The group of the backends that were named before KCCL's, as in "cpu:gloo,cuda:kccl".

    Must be called inside the function that PyTorch calls to make KCCL's group.

    Args:
        options: PyTorch's description of the group.

    Returns:
        The group; None if no backend was named before.
    """
    # PyTorch before 2.14 keeps the group to itself.
    group = options.process_group if hasattr(options, "process_group") else _group_of_caller()
    if group is None or not group._device_types:
        return None
    # Some versions name KCCL the default backend of this group, which does not have it, and fail
    # where they look it up.
    kind = group._get_backend(group._device_types[0]).name().upper()
    kinds = dist.ProcessGroup.BackendType
    group._set_default_backend(getattr(kinds, kind, kinds.CUSTOM))
    return group


def _group_of_caller() -> dist.ProcessGroup | None:
    """The group that PyTorch is making. It is a local variable of its function."""
    frame: FrameType | None = sys._getframe(1)
    makes = dist.distributed_c10d._new_process_group_helper.__code__
    while frame is not None and frame.f_code is not makes:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["pg"]


def init_group(group: dist.ProcessGroup, store: dist.Store, rank: int, world_size: int) -> None:
    """Runs the constructor of dist.ProcessGroup, for an object of a class made in Python."""
    try:
        dist.ProcessGroup.__init__(group, store, rank, world_size)
    except TypeError:
        # Some versions of PyTorch take a store for its own class only.
        dist.ProcessGroup.__init__(group, rank, world_size)


def split_of(
    group: dist.ProcessGroup,
    ranks: list[int],
    timeout: timedelta,
    name: str,
    description: str,
    device_types: list[torch.device] | None,
) -> dist.ProcessGroup | None:
    """A part of a group of PyTorch's own backends; None on the other ranks. All ranks call it.

    Args:
        group: The group.
        ranks: The part's ranks, by their numbers in the group.
        timeout, name, description: The part's.
        device_types: The types of device that the part is for; None: all.
    """
    # Older versions of PyTorch take no types, and give none.
    chosen: dict[str, Any] = {}
    if device_types is not None:
        wanted = {device.type for device in device_types}
        chosen["device_types"] = [each for each in group._device_types if each.type in wanted]
        if not chosen["device_types"]:
            return None
    return group.split_group(
        ranks, timeout=timeout, group_name=name, group_desc=description, **chosen
    )


def premul_factor(op: Any) -> Any:
    """The factor of a ReduceOp PREMUL_SUM: a number or a tensor."""
    if hasattr(op, "factor"):
        return op.factor
    # PyTorch before 2.13 shows it to pickle only.
    return op.__getstate__()[1]
