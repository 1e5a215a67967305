"""The calls of PyTorch that this version of KCCL does not have, and what to do instead.

Users rarely make these calls by these names: PyTorch makes them within other functions. So each
error names those functions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

_OTHER_GROUP = 'make that call on a group of another backend: group=dist.new_group(backend="gloo")'
_COALESCING = "call all_reduce, all_gather_into_tensor or reduce_scatter_tensor for each tensor"


class _Absent(NamedTuple):
    """A call that is absent.

    Attributes:
        what: The collective.
        callers: PyTorch's functions that make it.
        cure: What the user can do.
    """

    what: str
    callers: str
    cure: str


_REDUCE = _Absent(
    "reduce",
    "dist.reduce",
    f"use dist.all_reduce, or {_OTHER_GROUP}",
)
_GATHER = _Absent(
    "gather",
    "dist.gather, dist.gather_object and torch.distributed.checkpoint",
    "use dist.all_gather or dist.all_gather_object; or give the function a group of another "
    'backend: group=dist.new_group(backend="gloo"), and for checkpoints '
    'process_group=dist.new_group(backend="gloo")',
)
_SCATTER = _Absent(
    "scatter",
    "dist.scatter, dist.scatter_object_list and, for DTensor, distribute_tensor, distribute_module "
    "and parallelize_module",
    "give distribute_tensor and the parallel styles src_data_rank=None if all ranks have the same "
    "values; use dist.broadcast_object_list for objects; or " + _OTHER_GROUP,
)
_SEND_RECV = (
    "dist.send, isend, recv, irecv, batch_isend_irecv, send_object_list, recv_object_list and "
    "pipeline parallelism"
)
_SEND = _Absent("send", _SEND_RECV, f"use comm.put of KCCL, or {_OTHER_GROUP}")
_RECV = _Absent("recv", _SEND_RECV, f"use comm.put of KCCL, or {_OTHER_GROUP}")
_ALL_TO_ALL = _Absent(
    "all_to_all",
    "dist.all_to_all, dist.all_to_all_single and, for DTensor, a redistribution from one Shard "
    "to another",
    "redistribute to Replicate first; or " + _OTHER_GROUP,
)
_MONITORED_BARRIER = _Absent(
    "monitored_barrier",
    "dist.monitored_barrier",
    "use dist.barrier, whose errors name the rank that is missing; its limit is the timeout of "
    "init_process_group",
)
_COALESCED = _Absent("coalescing of any calls", "dist._coalescing_manager", _COALESCING)
_SPLIT = _Absent("split", "dist.split_group", "use dist.new_group(ranks)")

_BY_METHOD = {
    "reduce": _REDUCE,
    "gather": _GATHER,
    "gather_into_tensor": _GATHER,
    "gather_single": _GATHER,
    "scatter": _SCATTER,
    "send": _SEND,
    "recv": _RECV,
    "recv_anysource": _RECV,
    "alltoall": _ALL_TO_ALL,
    "alltoall_base": _ALL_TO_ALL,
    "all_to_all_single": _ALL_TO_ALL,
    "monitored_barrier": _MONITORED_BARRIER,
    "split_group": _SPLIT,
    "_start_coalescing": _COALESCED,
    "_end_coalescing": _COALESCED,
}


def _raiser(absent: _Absent) -> Callable[..., NoReturn]:
    def call(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f'backend "kccl": this version has no {absent.what}. PyTorch makes this call in '
            f"{absent.callers}. Instead: {absent.cure}"
        )

    return call


METHODS = {name: _raiser(absent) for name, absent in _BY_METHOD.items()}
"""Name of a method of a process group -> a method that raises NotImplementedError."""
