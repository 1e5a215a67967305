"""What PyTorch asks a group's backend besides its calls: what it can do, whether it has failed."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._C._distributed_c10d import ErrorType

from ..base.errors import Error, PeerLost, Timeout
from .torch_communicators import Communicators

# The calls of PyTorch's Backend that KCCL does not have. README.md says why.
_REFUSED = (
    "_register_on_completion_hook",
    "_wait_for_pending_works",
    "allocate_tensor",
    "allreduce_sparse",
    "get_reconfigure_handle",
    "memory_stats",
    "merge",
    "merge_remote_group",
    "new_window",
    "reconfigure",
    "register_abort_hook",
    "resume",
    "shrink",
    "split",
    "suspend",
    "unregister_abort_hook",
)


class Offers:
    """The part of ProcessGroup that PyTorch reads from a group's backend, here the group itself."""

    # If the first were False, dist.split_group() would raise, and init_process_group() would not
    # connect a given device_id.
    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    # Some versions of PyTorch before 2.14 read it in dist.split_group(). KCCL has no options.
    options = None

    _comms: Communicators

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Tells that KCCL has no memory of its own for tensors."""
        return False

    @property
    def mem_allocator(self) -> NoReturn:
        """Refused, because KCCL has no memory of its own for tensors."""
        _refuse("mem_allocator")

    def get_error(self) -> ErrorType:
        """Returns the kind of error with which a call of the group is known to have ended; SUCCESS
        if none is known. Does not wait: a call on a GPU may still fail.
        """
        try:
            self._comms.check()
        except Timeout:
            return ErrorType.TIMEOUT
        except PeerLost:
            return ErrorType.REMOTE_ERROR
        except Error:
            return ErrorType.COMM_ERROR
        return ErrorType.SUCCESS


def _refuse(name: str) -> NoReturn:
    # PyTorch's words for its own backends.
    raise NotImplementedError(f"Backend kccl does not support {name}")


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Offers, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse(name)

    refuse.__name__ = name
    return refuse


for _name in _REFUSED:
    setattr(Offers, _name, _refusing(_name))
