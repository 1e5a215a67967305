"""PyTorch's tensors as KCCL's arrays, and its streams as the order of a communicator's calls.

On the host a tensor is seen as a NumPy array, which takes the fast path of a call and knows
bfloat16; NumPy's DLPack does not.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..base import dtypes
from ..base.errors import Error, InvalidArgument
from ..comm import Communicator

_DTYPES = {getattr(torch, dtype.name): dtype for dtype in dtypes.ALL}

# The streams of each communicator's last call on a GPU, outside of captures and within.
_streams: "WeakKeyDictionary[Communicator, dict[bool, torch.cuda.Stream]]" = WeakKeyDictionary()


def array(x: torch.Tensor, name: str) -> Any:
    """A tensor as the collectives of a communicator take it: the same memory, without autograd.

    Args:
        x: On the host or a GPU.
        name: What the caller calls it, for error messages.

    Raises:
        InvalidArgument: KCCL does not have its element type, or it is sparse.
    """
    kind = _DTYPES.get(x.dtype)
    if kind is None:
        known = ", ".join(each.name for each in dtypes.ALL)
        raise InvalidArgument(f"{name} has dtype {x.dtype}, must be one of {known}")
    if x.layout is not torch.strided:
        raise InvalidArgument(f"{name} has layout {x.layout}, must be torch.strided")
    x = x.detach()
    if x.device.type != "cpu":
        return x
    if kind is dtypes.bfloat16:
        return x.view(torch.int16).numpy().view(dtypes.to_numpy(kind))
    return x.numpy()


def order(comm: Communicator, device: torch.device) -> "torch.cuda.Stream | None":
    """Lets the communicator's next call, on the current stream, come after its last one.

    Calls on one channel must not overlap, and PyTorch's programs change streams freely.

    Returns:
        The current stream of the device; None for the host, where a call has run when it returns.
    """
    if device.type != "cuda":
        return None
    now = torch.cuda.current_stream(device)
    is_capturing = _is_capturing(now)
    streams = _streams.setdefault(comm, {})
    last = streams.get(is_capturing, now)
    # Between a stream that is being captured and one that is not there can be no edge: the graph
    # runs later, where its replay is launched.
    if last != now and _is_capturing(last) == is_capturing:
        now.wait_stream(last)
    streams[is_capturing] = now
    return now


def _is_capturing(stream: "torch.cuda.Stream") -> bool:
    # The legacy default stream cannot be, and must not be asked while another one is.
    if stream.cuda_stream == 0:
        return False
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


def refuse_capture(device: torch.device, what: str) -> None:
    """Raises where a communicator would be made while a CUDA graph is captured.

    Raises:
        Error: The current stream is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise Error(
            f"{what} has no communicator for {device} yet, and none can be made while a CUDA graph "
            "is captured: make one call before the capture"
        )
