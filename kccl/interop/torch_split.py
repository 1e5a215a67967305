"""Splits a process group, for dist.split_group."""

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from .torch_errors import InvalidArgument

if TYPE_CHECKING:
    from .torch_group import ProcessGroup


def split_group(
    group: "ProcessGroup",
    ranks: list[int],
    timeout: timedelta | None,
    names: tuple[str | None, str | None],
    device_types: list[torch.device] | None,
) -> dist.ProcessGroup | None:
    """Returns a new group of some ranks of `group`; None on other ranks.

    Args:
        group: The group to split.
        ranks: The new group's ranks, by their numbers in `group`.
        timeout: The new group's timeout; None for that of `group`.
        names: Name and description of the new group; None for names made of those of `group`.
        device_types: As in ProcessGroup.split_group().

    Raises:
        InvalidArgument: See there.
    """
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(group.size())):
        raise InvalidArgument(
            f"ranks is {ranks}, must be different ranks of a group of {group.size()}"
        )
    name, description = names
    name = name or f"{group._name}:split:{','.join(map(str, ranks))}"
    description = description or f"{group._description}:split"
    timeout = timeout or group._timeout
    pairs = group._pairs()
    if device_types is not None:
        wanted = {device.type for device in device_types}
        known = [pair.split(":")[0] for pair in pairs]
        unknown = sorted(wanted - set(known))
        if unknown or not wanted:
            raise InvalidArgument(
                f"device_types has {', '.join(unknown) or 'none'}, must have some of "
                f"{', '.join(known)}, for which this group has a backend"
            )
        pairs = [pair for pair in pairs if pair.split(":")[0] in wanted]
    others = group._split_others(ranks, timeout, name, description, device_types)
    if group.rank() not in ranks:
        return None
    if others is not None and not any(pair.endswith(":kccl") for pair in pairs):
        return others
    store = dist.PrefixStore(f"{name}/", group._store)
    part = group._part(store, ranks.index(group.rank()), len(ranks), timeout, others)
    part._config = pairs
    part.setGroupName(name)
    part.setGroupDesc(description)
    return part
