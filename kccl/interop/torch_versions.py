"""Hides the differences between the versions of PyTorch that KCCL supports, from 2.11 on.

Each difference is detected by a feature, not by the version number. PyTorch's new names for the
calls of a process group need nothing here: GROUP_METHODS has the old and the new ones side by side.
"""

import sys
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist


def other_backends(options: Any) -> dist.ProcessGroup | None:
    """Returns the group of the backends that are named before KCCL, as in "cpu:gloo,cuda:kccl".

    Must be called while PyTorch calls the function that is registered to make KCCL's group.

    Args:
        options: PyTorch's description of the group.

    Returns:
        The group; None if no backend is named before KCCL.
    """
    # PyTorch before 2.14 does not pass the group.
    group = options.process_group if hasattr(options, "process_group") else _group_of_caller()
    if group is None or not group._device_types:
        return None
    # Some versions make KCCL the default backend of this group. The group has no KCCL backend, so
    # looking up the default would fail. Set one that the group has.
    kind = group._get_backend(group._device_types[0]).name().upper()
    kinds = dist.ProcessGroup.BackendType
    group._set_default_backend(getattr(kinds, kind, kinds.CUSTOM))
    return group


def _group_of_caller() -> dist.ProcessGroup | None:
    """Returns the group that PyTorch is making, read from the local variables of its function on
    the call stack; None if that function is not there.
    """
    frame: FrameType | None = sys._getframe(1)
    makes = dist.distributed_c10d._new_process_group_helper.__code__
    while frame is not None and frame.f_code is not makes:
        frame = frame.f_back
    return None if frame is None else frame.f_locals["pg"]


def init_group(group: dist.ProcessGroup, store: dist.Store, rank: int, world_size: int) -> None:
    """Runs the constructor of dist.ProcessGroup for an object of a Python subclass."""
    try:
        dist.ProcessGroup.__init__(group, store, rank, world_size)
    except TypeError:
        # Some versions of PyTorch take no store for objects of Python subclasses.
        dist.ProcessGroup.__init__(group, rank, world_size)


def split_of(
    group: dist.ProcessGroup,
    ranks: list[int],
    timeout: timedelta,
    name: str,
    description: str,
    device_types: list[torch.device] | None,
) -> dist.ProcessGroup | None:
    """Splits a group of PyTorch's own backends. All ranks of the group must call it.

    Args:
        group: The group.
        ranks: The new group's ranks, by their numbers in `group`.
        timeout, name, description: Those of the new group.
        device_types: The types of device that the new group is for; None: all.

    Returns:
        The new group; None on a rank that is not in `ranks`, or if the group has no backend for
        `device_types`.
    """
    # Older versions of PyTorch have no argument device_types. There callers give None.
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
    """Returns the factor of a ReduceOp PREMUL_SUM: a number or a tensor."""
    if hasattr(op, "factor"):
        return op.factor
    # PyTorch before 2.13 has no attribute for the factor. Only the state for pickle contains it.
    return op.__getstate__()[1]
