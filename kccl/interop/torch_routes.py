"""Passes a group's calls with tensors on another backend's devices to it, as in
"cpu:gloo,cuda:kccl".
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from .torch_dynamo import untraced

if TYPE_CHECKING:
    from .torch_group import ProcessGroup


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


def routed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `method`, wrapped to pass calls with tensors on another backend's devices to it."""

    def call(self: "ProcessGroup", *args: Any, **kwargs: Any) -> Any:
        # A part of a mixed group may have KCCL only.
        if self._others is not None:
            device = _device_of((*args, *kwargs.values()))
            if device is not None and not self._has(device.type):
                return getattr(self._others, name)(*args, **kwargs)
        return method(self, *args, **kwargs)

    call.__name__, call.__doc__ = name, method.__doc__
    return untraced(call)
