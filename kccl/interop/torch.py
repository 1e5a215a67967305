"""KCCL for PyTorch: a backend of torch.distributed, and collectives that torch.compile takes.

    import kccl.interop.torch as kccl_torch  # registers the backend "kccl"

    dist.init_process_group("kccl")
    dist.all_reduce(x)

    kccl_torch.register(kccl.init(backend="cuda"))
    y = kccl_torch.all_reduce(x)  # also inside torch.compile(fullgraph=True) and torch.cuda.graph

Tensors are on the host or on a GPU. Calls that reduce take the dtypes that comm.all_reduce takes.
Other calls take every dtype. Tensors must be dense: their elements lie one after another in memory,
in any order of the dimensions, as in torch.channels_last, and with the same strides on every rank.
Lists of tensors, which are copied, may have any strides. send and recv copy tensors on a GPU
through the host's memory. Either all ranks or none must give all_to_all_single split sizes.
PREMUL_SUM is kccl.premul_sum(), which refuses bool tensors and complex factors.

A collective on the host with async_op=True runs beside the program, on a thread of its group, or
within wait() if that comes first. A wrong argument is an error of wait() then. The calls of a group
run one after another, in the order in which they were made.

DistributedDataParallel's hook FP16_COMPRESS in C++ (_register_builtin_comm_hook) refuses futures of
groups that are written in Python. Use those of torch.distributed.algorithms.ddp_comm_hooks.

With tensors on the host, callbacks run on the group's thread, or within wait(), and may make calls
and wait for them. With several buckets, or other calls meanwhile, ranks may then make their calls
in different orders, as with gloo: data is mixed up or ranks wait until the timeout. Use one bucket
(a large bucket_cap_mb), or tensors on GPUs.

Calls on a GPU are enqueued on the current stream. A group's collectives with async_op=True run on a
stream of the process beside it, which waits for the current one; wait() makes the current stream
wait for the call. Those of DistributedDataParallel so overlap with backward. With KCCL_STREAMS=1
there is no such stream, with n there are n - 1, which groups share: so calls on the streams of the
program, other than its current one, count besides. Groups that share a stream must begin their
asynchronous calls in the same order on all ranks. A capture must wait() for its own asynchronous
calls. If two threads capture at once, one captures such calls on its current stream.

On the host and on a GPU, a direct call on a group's communicator() must follow wait() of the
group's asynchronous calls.

Ranks may be on several machines if tensors are on the host. torch_machines.py says how they
exchange. Such a group has no communicator. If a rank is lost, those on other machines may learn of
it only when their wait has reached the group's timeout.

The calls of one communicator run one after another, even on different streams. But a CUDA graph
with such calls must be replayed on the stream of the calls before and after it, and asynchronous
calls before it must have been waited for. Results have no gradient. Under torch.compile all ranks
must compile the same program: the compiler may drop a call whose result is unused, merge equal
calls, or move a call.
"""

from typing import Any

import torch
import torch.distributed as dist

from ..base.errors import InvalidArgument
from ..comm import Communicator
from .torch_collectives.all_gather import all_gather
from .torch_collectives.all_reduce import all_reduce, all_reduce_
from .torch_collectives.broadcast import broadcast, broadcast_
from .torch_collectives.reduce_scatter import reduce_scatter
from .torch_group import DEVICES, ProcessGroup
from .torch_mixed import MixedGroup
from .torch_norms import (
    all_reduce_rms_norm,
    all_reduce_rms_norm_,
    reduce_scatter_rms_norm,
    rms_norm,
)
from .torch_registry import register, unregister
from .torch_versions import other_backends

__all__ = [
    "ProcessGroup",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_reduce_rms_norm",
    "all_reduce_rms_norm_",
    "broadcast",
    "broadcast_",
    "communicator",
    "reduce_scatter",
    "reduce_scatter_rms_norm",
    "register",
    "rms_norm",
    "unregister",
]


def __dir__() -> list[str]:
    return __all__


def communicator(
    device: "torch.device | str", group: dist.ProcessGroup | None = None
) -> Communicator:
    """Returns the communicator that a process group of backend "kccl" uses for a device.

    The first call for a type of device makes the communicator. All ranks of the group must make
    that call. The group closes the communicator, so the caller must not.

    Args:
        device: "cpu", or "cuda" with or without a number. Without a number it is the current GPU.
        group: A group of torch.distributed; the default group when None.

    Raises:
        InvalidArgument: The group has another backend, or KCCL does not have this device type.
        Error: The communicator must be made first, and a CUDA graph is being captured.
        Timeout, PeerLost: A rank did not arrive in time, or has left or died.
    """
    device = torch.device(device)
    if device.type not in DEVICES:
        raise InvalidArgument(f"device is {device}, must be one of {', '.join(DEVICES)}")
    found = dist.group.WORLD if group is None else group
    if not isinstance(found, ProcessGroup):
        raise InvalidArgument(f'group is {found!r}, must be one of backend "kccl"')
    comm = found.communicator(device)
    if not isinstance(comm, Communicator):
        raise InvalidArgument(
            "the ranks of this group are on several machines, so it has no communicator: under "
            "mpirun kccl.init() makes one"
        )
    return comm


def _make(options: Any, backend_options: Any) -> ProcessGroup:
    """Makes the ProcessGroup that PyTorch asks a backend for in init_process_group()."""
    others = other_backends(options)
    given = options.store, options.group_rank, options.group_size, options.timeout
    return ProcessGroup(*given) if others is None else MixedGroup(*given, others)


dist.Backend.register_backend("kccl", _make, extended_api=True, devices=list(DEVICES))
