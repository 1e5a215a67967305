"""The process group of several backends, as of init_process_group("cpu:gloo,cuda:kccl")."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .torch_dynamo import untraced
from .torch_group import METHODS, ProcessGroup
from .torch_versions import split_of


def _device_of(arguments: Iterable[Any]) -> "torch.device | None":
    """Returns the device of the first tensor in a call's arguments; None if there is no tensor."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            return each.device
        if isinstance(each, list):
            found = _device_of(each)
            if found is not None:
                return found
    return None


def _routed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `method`, wrapped to pass calls with tensors on another backend's devices to it."""

    def call(self: "MixedGroup", *args: Any, **kwargs: Any) -> Any:
        device = _device_of((*args, *kwargs.values()))
        if device is not None and not self._has(device.type):
            return getattr(self._others, name)(*args, **kwargs)
        return method(self, *args, **kwargs)

    call.__name__, call.__doc__ = name, method.__doc__
    return untraced(call)


class MixedGroup(ProcessGroup):
    """A group that passes calls with tensors on another backend's devices to that backend."""

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        others: dist.ProcessGroup,
    ) -> None:
        """Makes the group as ProcessGroup does. Collective.

        Args:
            store, rank, world_size, timeout: As in ProcessGroup.
            others: The group of the other backends.
        """
        super().__init__(store, rank, world_size, timeout)
        self._others = others

    def setGroupName(self, name: str) -> None:
        super().setGroupName(name)
        self._others._set_group_name(name)

    def _get_backend(self, device: torch.device) -> Any:
        # PyTorch also calls this before it has registered the group, when _has() does not work yet.
        if device.type in {each.type for each in self._others._device_types}:
            return self._others._get_backend(device)
        return self

    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long ranks wait for each other from now on, in all backends."""
        super().set_timeout(timeout)
        self._others.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Does what ProcessGroup.shutdown() does, in all backends."""
        super().shutdown()
        self._others.shutdown()

    def abort(self) -> None:
        """Does what ProcessGroup.abort() does, in all backends."""
        super().abort()
        self._others.abort()

    @untraced
    def barrier(self, opts: Any = None) -> Any:
        """Runs dist.barrier: on KCCL's device, and without a GPU in the other backend."""
        if self._has(self._device_of_barrier(opts).type):
            return super().barrier(opts)
        return self._others.barrier(opts)

    def _device_of_barrier(self, opts: Any) -> torch.device:
        device = super()._device_of_barrier(opts)
        is_others = not self._has(device.type) and torch.cuda.is_available()
        return torch.device("cuda") if is_others else device

    def _split_others(
        self,
        ranks: list[int],
        timeout: timedelta,
        name: str,
        description: str,
        device_types: list[torch.device] | None,
    ) -> dist.ProcessGroup | None:
        return split_of(self._others, ranks, timeout, name, description, device_types)

    def _part(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        others: dist.ProcessGroup | None,
    ) -> ProcessGroup:
        # A part for KCCL's devices alone passes nothing on.
        if others is None:
            return super()._part(store, rank, world_size, timeout, None)
        return MixedGroup(store, rank, world_size, timeout, others)


for _name, _method in METHODS.items():
    setattr(MixedGroup, _name, _routed(_name, _method))
