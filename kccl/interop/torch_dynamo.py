"""Keeps torch.compile out of what PyTorch calls in the middle of a compiled step."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

_Method = TypeVar("_Method", bound=Callable[..., Any])


def untraced(method: _Method) -> _Method:
    """Returns the method, which Dynamo runs and does not trace.

    DistributedDataParallel calls the process group while its compiled model runs, and Dynamo traces
    every Python function that starts there. It fails on the attributes of the group and on C.
    """
    # Why not torch.compiler.disable: it loads Dynamo at once, which takes as long as PyTorch. This
    # loads it at the first call, as PyTorch's optimizers do.
    return cast(_Method, torch._disable_dynamo(method))
